//! Clones, where they are possible.

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
};

use stasis_cow::{CloneError, clone_file, grow};

use crate::support::DataDir;

#[test]
fn a_clone_isolates_writes_and_takes_no_space() {
    let Some(dir) = DataDir::new() else { return };
    let volume = dir.open();
    let base = volume.path().join("base");
    fs::write(&base, vec![1; 32 << 20]).unwrap();
    let source = OpenOptions::new().read(true).write(true).open(&base).unwrap();
    source.sync_all().unwrap();
    let free = volume.free_bytes().unwrap();
    let clones: Vec<File> = (0..8).map(|i| clone_file(&source, &volume.path().join(i.to_string())).unwrap()).collect();
    assert!(free - volume.free_bytes().unwrap() < 4 << 20, "the clones took space");

    clones[0].write_all_at(&[2; 100], 5000).unwrap();
    source.write_all_at(&[3; 100], 9000).unwrap();
    assert_eq!(grow(&clones[1], 40 << 20).unwrap(), 40 << 20);
    let bytes = |file: &File| {
        let mut found = [0; 2];
        file.read_exact_at(&mut found[..1], 5050).unwrap();
        file.read_exact_at(&mut found[1..], 9050).unwrap();
        found
    };
    assert_eq!(bytes(&clones[0]), [2, 1]);
    assert_eq!(bytes(&clones[1]), [1, 1]);
    assert_eq!(bytes(&source), [1, 3]);
    drop((source, clones));
    volume.close().unwrap();
}

#[test]
fn nothing_is_copied_between_file_systems() {
    let Some(dir) = DataDir::new() else { return };
    let volume = dir.open();
    fs::write(dir.path().join("outside"), vec![1; 10_000]).unwrap();
    let source = File::open(dir.path().join("outside")).unwrap();
    let target = volume.path().join("clone");
    assert!(matches!(clone_file(&source, &target), Err(CloneError::NoReflink { path, .. }) if path == target));
    assert!(!target.exists());
    volume.close().unwrap();
}
