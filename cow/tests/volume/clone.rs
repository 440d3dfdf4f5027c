//! Clones, where they are possible.

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
};

use stasis_cow::{CloneError, clone_file, clone_nameless, grow, reset_clone};

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

#[test]
fn a_clone_that_was_written_to_becomes_its_source_again() {
    let Some(dir) = DataDir::new() else { return };
    let volume = dir.open();
    let base = volume.path().join("base");
    let bytes: Vec<u8> = (0..8u32 << 20).map(|at| (at / 4096 % 251) as u8).collect();
    fs::write(&base, &bytes).unwrap();
    let source = File::open(&base).unwrap();
    let clone = clone_nameless(&source, volume.path()).unwrap();
    for life in 0..20 {
        // In place, in the page cache only, beyond the end; and a hole.
        clone.write_all_at(&[0xee; 100_000], life * 100_000).unwrap();
        clone.write_all_at(b"a secret", 9 << 20).unwrap();
        rustix::fs::fallocate(
            &clone,
            rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE,
            4 << 20,
            1 << 20,
        )
        .unwrap();
        reset_clone(&clone, &source).unwrap();
        let mut found = Vec::new();
        std::io::Read::read_to_end(&mut &clone, &mut found).unwrap();
        std::io::Seek::rewind(&mut &clone).unwrap();
        assert!(found == bytes, "life {life} left something");
    }
    assert!(fs::read(&base).unwrap() == bytes);
    drop((source, clone));
    volume.close().unwrap();
}
