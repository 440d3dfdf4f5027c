//! A disk that is full, or read-only.

use std::path::Path;

use rustix::{
    io::Errno,
    mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount},
};
use stasis_state::{Event, Record, SqliteStore, State, Store, StoreError};

use crate::{
    records::{at, made, record, step},
    run,
};

/// A small file system in memory, unmounted at the end.
struct Small(tempfile::TempDir);

impl Small {
    /// None where mounting is not allowed.
    fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        match mount("stasis-test", folder.path(), "tmpfs", MountFlags::empty(), Some(c"size=512k")) {
            Ok(()) => Some(Self(folder)),
            Err(Errno::PERM) => {
                println!("SKIPPED: mounting a small file system needs root");
                None
            }
            Err(error) => panic!("no tmpfs: {error}"),
        }
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn remount(&self, flags: MountFlags, size: &std::ffi::CStr) {
        mount_remount(self.path(), flags, size).unwrap();
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Whatever the test has failed at, the mount does not stay.
        let _ = unmount(self.path(), UnmountFlags::DETACH);
    }
}

fn is_unavailable<T>(result: &Result<T, StoreError>) -> bool {
    matches!(result, Err(StoreError::Unavailable { .. }))
}

#[test]
fn a_full_disk_refuses_writes_keeps_reading_and_works_again() {
    let Some(disk) = Small::mount() else { return };
    let store = SqliteStore::open(&disk.path().join("state.db")).unwrap();
    run(async {
        let first = made(&store, "first", "acme", State::Running).await;
        let mut kept: Vec<Record> = vec![first.clone()];
        // A record has at least some hundred bytes, and the disk 512 KiB.
        let refused = loop {
            let next = record(&format!("n{}", kept.len()), "acme");
            match store.create(next.clone()).await {
                Ok(()) => kept.push(next),
                Err(error) => break error,
            }
            assert!(kept.len() < 10_000, "it is never full");
        };
        assert!(is_unavailable::<()>(&Err(refused.clone())), "{refused}");
        assert!(refused.to_string().contains("full"), "{refused}");
        // Nothing that was acknowledged is lost, and all of it is read.
        for record in &kept {
            assert_eq!(store.get(record.id()).await.unwrap(), *record);
        }
        disk.remount(MountFlags::empty(), c"size=8m");
        step(&store, &first, Event::PauseBegun, at(5_000)).await;
        for n in 0..100 {
            store.create(record(&format!("later{n}"), "acme")).await.unwrap();
        }
    });
}

#[test]
fn a_read_only_disk_is_refused_at_the_opening_and_works_again() {
    let Some(disk) = Small::mount() else { return };
    let file = disk.path().join("state.db");
    drop(SqliteStore::open(&file).unwrap());
    // While a store is open for writing, the kernel refuses such a remount.
    disk.remount(MountFlags::RDONLY, c"size=512k");
    assert!(SqliteStore::open(&file).is_err());
    disk.remount(MountFlags::empty(), c"size=512k");
    let store = SqliteStore::open(&file).unwrap();
    run(async {
        made(&store, "a", "acme", State::Running).await;
    });
}
