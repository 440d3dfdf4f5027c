//! The file systems that a guest has beside its root.

use std::{fs, os::unix::fs::symlink, path::Path};

use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
};

use crate::console;

/// The function's own disk, if it has one.
const APP_DISK: &str = "/dev/vdb";

/// A file system without which no function can run could not be mounted.
#[derive(Debug, thiserror::Error)]
#[error("cannot mount {kind} at {target}")]
pub struct MountError {
    kind: &'static str,
    target: &'static str,
    #[source]
    errno: Errno,
}

struct Mount {
    kind: &'static str,
    source: &'static str,
    target: &'static str,
    flags: MsFlags,
    data: &'static str,
    mandatory: bool,
}

const PLAIN: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);
const BARE: MsFlags = PLAIN.union(MsFlags::MS_NOEXEC);

#[rustfmt::skip]
const MOUNTS: [Mount; 8] = [
    Mount { kind: "proc", source: "proc", target: "/proc", flags: BARE, data: "", mandatory: true },
    Mount { kind: "sysfs", source: "sys", target: "/sys", flags: BARE, data: "", mandatory: false },
    Mount { kind: "devtmpfs", source: "dev", target: "/dev", flags: MsFlags::MS_NOSUID, data: "mode=755", mandatory: true },
    Mount { kind: "devpts", source: "devpts", target: "/dev/pts", flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC), data: "gid=5,mode=620,ptmxmode=666", mandatory: false },
    Mount { kind: "tmpfs", source: "shm", target: "/dev/shm", flags: PLAIN, data: "mode=1777", mandatory: false },
    Mount { kind: "tmpfs", source: "run", target: "/run", flags: PLAIN, data: "mode=755", mandatory: true },
    Mount { kind: "tmpfs", source: "tmp", target: "/tmp", flags: PLAIN, data: "mode=1777", mandatory: false },
    Mount { kind: "cgroup2", source: "cgroup2", target: "/sys/fs/cgroup", flags: BARE, data: "", mandatory: false },
];

const APP: Mount = Mount {
    kind: "ext4",
    source: APP_DISK,
    target: "/app",
    flags: PLAIN.union(MsFlags::MS_RDONLY),
    data: "",
    mandatory: true,
};

/// What programs expect in `/dev` and devtmpfs does not make.
const LINKS: [(&str, &str); 4] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
];

/// Mounts everything; a failure that functions can live with is told and passed over.
///
/// # Errors
/// The first mandatory file system that could not be mounted.
pub fn all() -> Result<(), MountError> {
    for each in &MOUNTS {
        each.mount()?;
    }
    for (original, link) in LINKS {
        if let Err(error) = symlink(original, link)
            && error.kind() != std::io::ErrorKind::AlreadyExists
        {
            console::say(format_args!("{link}: {error}"));
        }
    }
    if Path::new(APP_DISK).exists() {
        APP.mount()?;
    }
    Ok(())
}

impl Mount {
    fn mount(&self) -> Result<(), MountError> {
        // Where the directory is missing and cannot be made, mount says so.
        let _ = fs::create_dir_all(self.target);
        match mount(Some(self.source), self.target, Some(self.kind), self.flags, Some(self.data)) {
            // The kernel mounts devtmpfs itself where it is told to.
            Ok(()) | Err(Errno::EBUSY) => Ok(()),
            Err(errno) if self.mandatory => Err(MountError { kind: self.kind, target: self.target, errno }),
            Err(errno) => {
                console::say(format_args!("{} at {}: {errno}", self.kind, self.target));
                Ok(())
            }
        }
    }
}
