//! Opened, killed, reopened, closed.

use std::{fs, path::Path, process::Command};

use stasis_cow::{Volume, VolumeOptions, supports_reflink, volume::detach_leftovers};

use crate::support::{DataDir, OPTIONS};

#[test]
fn a_closed_volume_leaves_neither_mount_nor_loop_device() {
    let Some(dir) = DataDir::new() else { return };
    let volume = dir.open();
    assert!(supports_reflink(volume.path()).unwrap());
    assert_eq!((dir.mounts(), dir.loops()), (1, 1));
    assert!((100 << 20..320 << 20).contains(&volume.free_bytes().unwrap()));
    fs::write(volume.path().join("kept"), "x").unwrap();
    volume.close().unwrap();
    assert_eq!((dir.mounts(), dir.loops()), (0, 0));

    let volume = dir.open();
    assert_eq!(fs::read(volume.path().join("kept")).unwrap(), b"x");
    volume.close().unwrap();
    assert_eq!((dir.mounts(), dir.loops()), (0, 0));
}

#[test]
fn a_killed_process_leaves_its_mount_to_the_next() {
    let Some(dir) = DataDir::new() else { return };
    let volume = dir.open();
    fs::write(volume.path().join("kept"), "x").unwrap();
    drop(volume);
    assert_eq!((dir.mounts(), dir.loops()), (1, 1));
    let volume = dir.open();
    assert_eq!((dir.mounts(), dir.loops()), (1, 1));
    assert_eq!(fs::read(volume.path().join("kept")).unwrap(), b"x");
    volume.close().unwrap();
    assert_eq!((dir.mounts(), dir.loops()), (0, 0));
}

#[test]
fn a_process_killed_between_two_steps_leaves_nothing_in_the_way() {
    let Some(dir) = DataDir::new() else { return };
    dir.open().close().unwrap();
    let losetup = |image: &Path| {
        let attached = Command::new("losetup").args(["--find", "--show"]).arg(image).output().unwrap();
        assert!(attached.status.success());
        String::from_utf8(attached.stdout).unwrap().trim().to_owned()
    };
    // Attached, not mounted.
    losetup(&dir.image());
    losetup(&dir.image());
    assert_eq!(dir.loops(), 2);
    dir.open().close().unwrap();
    assert_eq!((dir.mounts(), dir.loops()), (0, 0));
    // Mounted, the device not yet given up to the mount.
    let device = losetup(&dir.image());
    assert!(
        Command::new("mount").args(["-t", "xfs", &device]).arg(dir.path().join("data")).status().unwrap().success()
    );
    dir.open().close().unwrap();
    assert_eq!((dir.mounts(), dir.loops()), (0, 0));
    // An image half made.
    fs::remove_file(dir.image()).unwrap();
    fs::write(dir.path().join("data.xfs.new"), "half").unwrap();
    dir.open().close().unwrap();
    assert!(!dir.path().join("data.xfs.new").exists());
}

#[test]
fn leftovers_are_detached_on_demand() {
    let Some(dir) = DataDir::new() else { return };
    assert!(!detach_leftovers(&dir.path().join("nothing")).unwrap());
    assert!(!detach_leftovers(dir.path()).unwrap());
    drop(dir.open());
    assert!(detach_leftovers(dir.path()).unwrap());
    assert_eq!((dir.mounts(), dir.loops()), (0, 0));
    assert!(!detach_leftovers(dir.path()).unwrap());
}

#[test]
fn a_directory_with_reflink_is_used_as_it_is() {
    let Some(dir) = DataDir::new() else { return };
    let outer = dir.open();
    let inner = outer.path().join("inner");
    let volume = Volume::open(&inner, &VolumeOptions::default()).unwrap();
    assert_eq!(volume.path(), inner.canonicalize().unwrap().join("data"));
    assert!(!inner.join("data.xfs").exists());
    assert!(volume.free_bytes().unwrap() > 100 << 20);
    volume.close().unwrap();
    // A mount that is not ours is used, and not unmounted.
    let own = dir.path().join("own");
    fs::create_dir_all(own.join("data")).unwrap();
    let bind = Command::new("mount").arg("--bind").args([outer.path(), &own.join("data")]).status();
    assert!(bind.unwrap().success());
    Volume::open(&own, &VolumeOptions { always_image: false, ..OPTIONS }).unwrap().close().unwrap();
    let unbind = Command::new("umount").arg(own.join("data")).status();
    assert!(unbind.unwrap().success(), "it was unmounted by the volume");
    outer.close().unwrap();
}
