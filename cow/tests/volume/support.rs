//! A volume on a loop device, and a look at what the kernel has of it.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use stasis_cow::{Volume, VolumeOptions, volume::detach_leftovers};
use tempfile::TempDir;

pub(crate) const OPTIONS: VolumeOptions = VolumeOptions { image_bytes: Some(320 << 20), always_image: true };

/// A data directory that leaves no mount behind, whatever its test does.
/// One at a time: a process being spawned by another test has, until its `exec`, this one's files open.
pub(crate) struct DataDir(TempDir, #[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

impl DataDir {
    /// None, loudly, where the host cannot mount.
    pub(crate) fn new() -> Option<Self> {
        static ONE: Mutex<()> = Mutex::new(());
        static SKIPPED: AtomicUsize = AtomicUsize::new(0);
        let root = fs::metadata("/proc/self").unwrap().uid() == 0;
        if root && Path::new("/dev/loop-control").exists() {
            let turn = ONE.lock().unwrap_or_else(PoisonError::into_inner);
            return Some(Self(tempfile::tempdir().unwrap(), turn));
        }
        let count = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
        eprintln!("SKIPPED ({count} so far): volume tests need root and /dev/loop-control");
        None
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.path().join("data.xfs")
    }

    pub(crate) fn open(&self) -> Volume {
        Volume::open(self.path(), &OPTIONS).unwrap()
    }

    pub(crate) fn mounts(&self) -> usize {
        let point = self.path().canonicalize().unwrap().join("data");
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        table.lines().filter(|line| line.split(' ').nth(4) == point.to_str()).count()
    }

    pub(crate) fn loops(&self) -> usize {
        let listed = Command::new("losetup")
            .arg("-j")
            .arg(self.path().canonicalize().unwrap().join("data.xfs"))
            .output()
            .unwrap();
        assert!(listed.status.success());
        listed.stdout.iter().filter(|byte| **byte == b'\n').count()
    }
}

impl Drop for DataDir {
    fn drop(&mut self) {
        if let Err(error) = detach_leftovers(self.path()) {
            eprintln!("{} is left mounted: {error}", self.path().display());
        }
    }
}
