//! What is not opened, and says why.

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    process::Command,
};

use stasis_cow::{Volume, VolumeError, VolumeOptions, volume::detach_leftovers};

use crate::support::{DataDir, OPTIONS};

#[test]
fn one_process_per_directory() {
    let Some(dir) = DataDir::new() else { return };
    let volume = dir.open();
    assert!(matches!(Volume::open(dir.path(), &OPTIONS), Err(VolumeError::InUse { .. })));
    assert!(matches!(detach_leftovers(dir.path()), Err(VolumeError::InUse { .. })));
    assert_eq!(dir.mounts(), 1);
    volume.close().unwrap();
}

#[test]
fn an_open_file_keeps_the_volume() {
    let Some(dir) = DataDir::new() else { return };
    let volume = dir.open();
    let file = File::create(volume.path().join("x")).unwrap();
    assert!(matches!(volume.close(), Err(VolumeError::Busy { .. })));
    assert_eq!((dir.mounts(), dir.loops()), (1, 1));
    drop(file);
    dir.open().close().unwrap();
    assert_eq!((dir.mounts(), dir.loops()), (0, 0));
}

#[test]
fn a_corrupt_or_foreign_image() {
    let Some(dir) = DataDir::new() else { return };
    dir.open().close().unwrap();
    let image = OpenOptions::new().read(true).write(true).open(dir.image()).unwrap();
    let mut block = [0; 512];
    image.read_exact_at(&mut block, 0).unwrap();
    // The root inode's number, which the superblock's checksum covers.
    image.write_all_at(&[0xff; 8], 56).unwrap();
    assert!(matches!(Volume::open(dir.path(), &OPTIONS), Err(VolumeError::Corrupt { .. })));
    assert_eq!((dir.mounts(), dir.loops()), (0, 0));

    image.write_all_at(&block, 0).unwrap();
    dir.open().close().unwrap();
    let length = image.metadata().unwrap().len();
    image.set_len(length / 2).unwrap();
    assert!(matches!(Volume::open(dir.path(), &OPTIONS), Err(VolumeError::Foreign { .. })));

    fs::write(dir.image(), "something else").unwrap();
    assert!(matches!(Volume::open(dir.path(), &OPTIONS), Err(VolumeError::Foreign { .. })));
    assert_eq!(fs::read(dir.image()).unwrap(), b"something else");
    assert_eq!((dir.mounts(), dir.loops()), (0, 0));
}

#[test]
fn sizes_that_cannot_be() {
    let Some(dir) = DataDir::new() else { return };
    let open = |bytes| Volume::open(dir.path(), &VolumeOptions { image_bytes: Some(bytes), always_image: true });
    assert!(matches!(open(1 << 20), Err(VolumeError::TooSmall { .. })));
    assert!(matches!(open(1 << 60), Err(VolumeError::NoSpace { .. })));
    assert!(!dir.image().exists());
}

#[test]
fn files_that_the_mount_would_hide() {
    let Some(dir) = DataDir::new() else { return };
    fs::create_dir(dir.path().join("data")).unwrap();
    fs::write(dir.path().join("data/precious"), "").unwrap();
    assert!(matches!(Volume::open(dir.path(), &OPTIONS), Err(VolumeError::Hides { .. })));
    assert_eq!(dir.loops(), 0);
}

#[test]
fn an_image_that_is_mounted_elsewhere() {
    let Some(dir) = DataDir::new() else { return };
    let volume = dir.open();
    let elsewhere = dir.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    assert!(Command::new("mount").arg("--bind").args([volume.path(), &elsewhere]).status().unwrap().success());
    let closed = volume.close();
    let reopened = Volume::open(dir.path(), &OPTIONS);
    let detached = detach_leftovers(dir.path());
    assert!(Command::new("umount").arg(&elsewhere).status().unwrap().success());
    for refused in [closed, reopened.map(drop), detached.map(drop)] {
        assert!(matches!(refused, Err(VolumeError::Attached { .. })), "{refused:?}");
    }
    assert_eq!((dir.mounts(), dir.loops()), (0, 0));
}
