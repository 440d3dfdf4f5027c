//! Snapshots, where their disks are cloned from.

use std::fs;

use stasis_cow::{Snapshot, SnapshotError, Staging, clone_file, grow};

use crate::support::DataDir;

#[test]
fn cloning_a_part_and_writing_to_the_clone_does_not_alter_it() {
    let Some(dir) = DataDir::new() else { return };
    let volume = dir.open();
    let staging = Staging::new(volume.path()).unwrap();
    fs::write(staging.path("disk"), vec![1; 1 << 20]).unwrap();
    let folder = volume.path().join("snapshot");
    staging.publish(&folder, serde_json::json!({}), 1).unwrap();

    let snapshot = Snapshot::open(&folder).unwrap();
    for i in 0..3 {
        let clone = clone_file(snapshot.part("disk").unwrap(), &volume.path().join(i.to_string())).unwrap();
        grow(&clone, 2 << 20).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&clone, &[2; 100], 0).unwrap();
        clone.sync_all().unwrap();
    }
    snapshot.part("disk").unwrap();
    drop(snapshot);
    volume.close().unwrap();

    // Neither does a remount; a write does.
    let volume = dir.open();
    let snapshot = Snapshot::open(&folder).unwrap();
    fs::OpenOptions::new().write(true).open(folder.join("disk")).unwrap().set_len(4096).unwrap();
    assert!(matches!(snapshot.part("disk"), Err(SnapshotError::Altered { .. })));
    assert!(matches!(Snapshot::open(&folder), Err(SnapshotError::Truncated { .. })));
    drop(snapshot);
    volume.close().unwrap();
}
