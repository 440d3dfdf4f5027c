//! One process per data directory.

use std::{
    fs::{File, OpenOptions, TryLockError},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use super::VolumeError;

/// Held until dropped, or until the process ends in whatever way.
#[derive(Debug)]
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    pub(super) fn acquire(folder: &Path) -> Result<Self, VolumeError> {
        let path = folder.join("lock");
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = file.map_err(VolumeError::io("open", &path))?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => Err(VolumeError::InUse { path }),
            Err(TryLockError::Error(source)) => Err(VolumeError::Io { action: "lock", path, source }),
        }
    }
}
