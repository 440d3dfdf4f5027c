//! Why a volume cannot be used.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::tool::ToolError;

/// Why the data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// A file or folder of it cannot be used.
    #[error("cannot {action} {path:?}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The lock is held.
    #[error("another stasis uses this data directory: {path:?} is locked; stop that one or name another directory")]
    InUse {
        /// The lock.
        path: PathBuf,
    },
    /// The file system that the image would be on is too full.
    #[error(
        "{path:?} has {free} bytes free, but the image of the data needs {needed}: free space or name another directory"
    )]
    NoSpace {
        /// The data directory.
        path: PathBuf,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// The asked size is less than XFS takes.
    #[error("an image of {asked} bytes is too small for XFS: ask for at least {least}")]
    TooSmall {
        /// Bytes asked for.
        asked: u64,
        /// Bytes that XFS takes.
        least: u64,
    },
    /// The image is not one that stasis made.
    #[error("{image:?} is not stasis' XFS image ({reason}): move it away to begin anew, or restore it")]
    Foreign {
        /// The image.
        image: PathBuf,
        /// What gave it away.
        reason: String,
    },
    /// The kernel refuses to mount the image.
    #[error("{image:?} cannot be mounted as XFS: try `xfs_repair {image:?}`, or move it away to begin anew")]
    Corrupt {
        /// The image.
        image: PathBuf,
        /// The kernel's refusal.
        #[source]
        source: io::Error,
    },
    /// The image is mounted where this process does not see it or does not want it.
    #[error(
        "{image:?} is still in use by {devices:?}, mounted elsewhere or in another mount namespace: unmount it there"
    )]
    Attached {
        /// The image.
        image: PathBuf,
        /// Loop devices.
        devices: Vec<PathBuf>,
    },
    /// Something without reflink is mounted where the data belongs.
    #[error("{origin}, mounted at {path:?}, has no reflink: unmount it, or mount XFS or btrfs there")]
    NoReflink {
        /// The mount point.
        path: PathBuf,
        /// What is mounted there.
        origin: String,
    },
    /// There are files which the mount would hide.
    #[error("{path:?} is not empty, and mounting the image there would hide its files: move them away")]
    Hides {
        /// The folder.
        path: PathBuf,
    },
    /// Files in the volume are open, or are somebody's working directory.
    #[error("{path:?} is busy: end what uses its files (`fuser -vm {path:?}` names it)")]
    Busy {
        /// The mount point.
        path: PathBuf,
    },
    /// The mount itself failed.
    #[error("cannot mount {device:?} at {path:?}")]
    Mount {
        /// The loop device.
        device: PathBuf,
        /// The mount point.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A tool failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
}

impl VolumeError {
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}
