//! The data directory, with reflink: as it is where its file system has that, else as an XFS image on a loop device.
//!
//! ```text
//!            open                          close
//!   (none) ────────► locked, mounted ────────────────► unlocked, unmounted, no loop device
//!                      │        ▲
//!         dropped, or  │        │ open: reuses the mount,
//!         killed       ▼        │ detaches what is attached but not mounted
//!                    unlocked, mounted ──────────────► unlocked, unmounted, no loop device
//!                                      detach_leftovers
//! ```
//!
//! The loop device is detached right after mounting: it then lives exactly as long as the mount.

mod error;
mod image;
mod lock;
mod loopdev;
mod mount;
mod mountinfo;
mod uevent;

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use crate::supports_reflink;

pub use error::VolumeError;

use self::{image::XfsImage, lock::Lock, mount::Mounted};

/// How a volume is made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VolumeOptions {
    /// Size of a new image in bytes; by default 80 % of what is free, in whole GiB, at least 4 GiB. It uses space as it fills.
    pub image_bytes: Option<u64>,
    /// Make an image even where the data directory has reflink.
    pub always_image: bool,
}

/// A data directory with reflink, which belongs to this process. Dropping it unlocks it and leaves it mounted.
#[derive(Debug)]
pub struct Volume {
    folder: PathBuf,
    path: PathBuf,
    image: Option<XfsImage>,
    _lock: Lock,
}

impl Volume {
    /// Locks `data_dir` and makes `data_dir/data` a folder with reflink.
    ///
    /// # Errors
    /// [`VolumeError`], which says what to change.
    pub fn open(data_dir: &Path, options: &VolumeOptions) -> Result<Self, VolumeError> {
        let failed = |action| VolumeError::io(action, data_dir);
        fs::create_dir_all(data_dir).map_err(failed("create"))?;
        let folder = data_dir.canonicalize().map_err(failed("resolve"))?;
        let lock = Lock::acquire(&folder)?;
        let path = folder.join("data");
        let created = DirBuilder::new().recursive(true).mode(0o700).create(&path);
        created.map_err(VolumeError::io("create", &path))?;

        let image = XfsImage::in_folder(&folder);
        let image = match mount::at(&path, &image)? {
            Mounted::Image => {
                // The mount's maker may have been killed before it detached the device.
                loopdev::detach_all(image.path())?;
                Some(image)
            }
            Mounted::Other { .. } if supports_reflink(&path).map_err(VolumeError::io("clone in", &path))? => None,
            Mounted::Other { origin } => return Err(VolumeError::NoReflink { path, origin }),
            Mounted::Nothing => {
                let as_is = !options.always_image
                    && !image.exists()
                    && supports_reflink(&path).map_err(VolumeError::io("clone in", &path))?;
                if as_is {
                    None
                } else {
                    image.create_if_missing(options.image_bytes)?;
                    mount::mount(&image, &path)?;
                    Some(image)
                }
            }
        };
        tracing::info!(path = %path.display(), image = image.is_some(), "the data directory is ready");
        Ok(Self { folder, path, image, _lock: lock })
    }

    /// Where the data is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes that can still be written: an image's own, but no more than the file system below it has.
    ///
    /// # Errors
    /// [`VolumeError::Io`].
    pub fn free_bytes(&self) -> Result<u64, VolumeError> {
        let inside = free_bytes(&self.path)?;
        match self.image {
            Some(_) => Ok(inside.min(free_bytes(&self.folder)?)),
            None => Ok(inside),
        }
    }

    /// Unmounts the image, where there is one, and unlocks the data directory.
    ///
    /// # Errors
    /// [`VolumeError::Busy`] while files in it are open; it then stays mounted.
    pub fn close(self) -> Result<(), VolumeError> {
        match &self.image {
            Some(image) => mount::unmount(image, &self.path),
            None => Ok(()),
        }
    }
}

/// Unmounts and detaches what a killed stasis left of `data_dir`. True if there was something.
///
/// # Errors
/// [`VolumeError::InUse`] while a stasis uses it, [`VolumeError::Busy`] while somebody else does.
pub fn detach_leftovers(data_dir: &Path) -> Result<bool, VolumeError> {
    let folder = match data_dir.canonicalize() {
        Ok(folder) => folder,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(source) => return Err(VolumeError::Io { action: "resolve", path: data_dir.into(), source }),
    };
    let image = XfsImage::in_folder(&folder);
    if !image.exists() {
        return Ok(false);
    }
    let _lock = Lock::acquire(&folder)?;
    let path = folder.join("data");
    let attached = loopdev::detach_all(image.path())?;
    match mount::at(&path, &image)? {
        Mounted::Image => mount::unmount(&image, &path)?,
        Mounted::Nothing | Mounted::Other { .. } => mount::released(&image)?,
    }
    Ok(attached)
}

fn free_bytes(path: &Path) -> Result<u64, VolumeError> {
    let stat =
        rustix::fs::statvfs(path).map_err(io::Error::from).map_err(VolumeError::io("ask for free space in", path))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}
