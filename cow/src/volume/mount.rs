//! Mounting the image, and giving it up.

use std::{fs, io, path::Path, time::Duration};

use rustix::{
    io::Errno,
    mount::{MountFlags, UnmountFlags},
};

use crate::supports_reflink;

use super::{VolumeError, image::XfsImage, loopdev, mountinfo};

/// How long a device may be looked at by others after it was given up.
const RELEASE: Duration = Duration::from_secs(2);

/// What is mounted where the data belongs.
#[derive(Debug)]
pub(super) enum Mounted {
    /// Nothing.
    Nothing,
    /// Our image.
    Image,
    /// Something else.
    Other {
        /// For a person.
        origin: String,
    },
}

/// What is mounted at `path`.
pub(super) fn at(path: &Path, image: &XfsImage) -> Result<Mounted, VolumeError> {
    let mounts = mountinfo::mounts().map_err(VolumeError::io("read", Path::new("/proc/self/mountinfo")))?;
    let Some(mount) = mountinfo::topmost(&mounts, path) else { return Ok(Mounted::Nothing) };
    let origin = format!("{} ({})", mount.source, mount.kind);
    if !image.exists() {
        return Ok(Mounted::Other { origin });
    }
    for device in loopdev::attached(image.path())? {
        if loopdev::number(&device)? == mount.device {
            return Ok(Mounted::Image);
        }
    }
    Ok(Mounted::Other { origin })
}

/// Attaches the image, mounts it at `path`, and leaves the device to the mount.
pub(super) fn mount(image: &XfsImage, path: &Path) -> Result<(), VolumeError> {
    if fs::read_dir(path).map_err(VolumeError::io("list", path))?.next().is_some() {
        return Err(VolumeError::Hides { path: path.into() });
    }
    loopdev::detach_all(image.path())?;
    let device = loopdev::attach(image.path())?;
    let mounted = mount_device(image, &device, path);
    // While it is mounted this only marks the device, which goes with the mount.
    let detached = loopdev::detach(&device);
    if mounted.is_err() {
        // A device is left where the image is mounted elsewhere: XFS refuses to be mounted a second time.
        released(image)?;
        let devices = loopdev::attached_by_inode(image.path())?;
        if !devices.is_empty() {
            return Err(VolumeError::Attached { image: image.path().into(), devices });
        }
    }
    mounted?;
    detached?;
    if supports_reflink(path).map_err(VolumeError::io("clone in", path))? {
        return Ok(());
    }
    unmount(image, path)?;
    Err(VolumeError::Foreign { image: image.path().into(), reason: "it was made without reflink".into() })
}

/// Unmounts `path`, and sees to it that no device of the image is left.
pub(super) fn unmount(image: &XfsImage, path: &Path) -> Result<(), VolumeError> {
    match rustix::mount::unmount(path, UnmountFlags::NOFOLLOW) {
        Ok(()) => released(image),
        Err(Errno::BUSY) => Err(VolumeError::Busy { path: path.into() }),
        Err(errno) => Err(VolumeError::io("unmount", path)(errno.into())),
    }
}

fn mount_device(image: &XfsImage, device: &Path, path: &Path) -> Result<(), VolumeError> {
    let flags = MountFlags::NOATIME | MountFlags::NODEV | MountFlags::NOSUID;
    let Err(errno) = rustix::mount::mount(device, path, "xfs", flags, None) else { return Ok(()) };
    let source = io::Error::from(errno);
    Err(match errno {
        // EUCLEAN and EBADMSG are how XFS says that a structure or a checksum is wrong.
        Errno::UCLEAN | Errno::BADMSG | Errno::INVAL | Errno::IO => {
            VolumeError::Corrupt { image: image.path().into(), source }
        }
        _ => VolumeError::Mount { device: device.into(), path: path.into(), source },
    })
}

/// Sees to it that no device has the image below it.
pub(super) fn released(image: &XfsImage) -> Result<(), VolumeError> {
    let devices = loopdev::wait_until_detached(image.path(), RELEASE)?;
    if devices.is_empty() { Ok(()) } else { Err(VolumeError::Attached { image: image.path().into(), devices }) }
}
