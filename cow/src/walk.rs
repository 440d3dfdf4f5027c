//! All that is in a folder, in an order that depends on the names alone.

use std::{
    fs::{self, Metadata},
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

/// A folder or one of its entries could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {path:?}")]
pub struct WalkError {
    /// What could not be read.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// One entry below the folder.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Its path below the folder.
    pub(crate) relative: PathBuf,
    /// Of the entry itself: a symbolic link is not followed.
    pub(crate) metadata: Metadata,
}

/// Lists everything below `root`, sorted by the bytes of the relative path.
pub(crate) fn walk(root: &Path) -> Result<Vec<Entry>, WalkError> {
    let mut entries = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let path = root.join(&folder);
        let failed = |source| WalkError { path: path.clone(), source };
        for entry in fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let metadata = entry.metadata().map_err(|source| WalkError { path: entry.path(), source })?;
            let relative = folder.join(entry.file_name());
            if metadata.is_dir() {
                folders.push(relative.clone());
            }
            entries.push(Entry { relative, metadata });
        }
    }
    entries.sort_by(|a, b| a.relative.as_os_str().as_bytes().cmp(b.relative.as_os_str().as_bytes()));
    Ok(entries)
}
