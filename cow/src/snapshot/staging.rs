//! A snapshot while it is being made.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, DirBuilder, File, Permissions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{CWD, RenameFlags},
    io::Errno,
};
use uuid::Uuid;

use crate::{
    clone::{folder_of, sync_folder},
    digest_file,
};

use super::{
    MANIFEST, is_part_name,
    manifest::{FORMAT, Manifest, Part},
};

const SUFFIX: &str = ".staging";

/// Why a snapshot was not published. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// There is already something of this name.
    #[error("{path:?} is already there: a snapshot replaces nothing")]
    Exists {
        /// Its place.
        path: PathBuf,
    },
    /// Something in the folder cannot be a part.
    #[error(
        "{name:?} cannot be a snapshot's part: parts are regular files named by letters, digits, dots, dashes and underscores"
    )]
    Part {
        /// Its name.
        name: OsString,
    },
    /// The details are not JSON.
    #[error("the manifest's details cannot be written as JSON")]
    Details(#[source] serde_json::Error),
    /// A file cannot be read, written or renamed.
    #[error("cannot {action} {path:?}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl PublishError {
    fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}

/// A hidden folder that becomes a snapshot, or vanishes when dropped.
#[derive(Debug)]
pub struct Staging {
    folder: PathBuf,
    published: bool,
}

impl Staging {
    /// Makes the folder, in the file system of the snapshots that are to be.
    ///
    /// # Errors
    /// [`PublishError::Io`].
    pub fn new(parent: &Path) -> Result<Self, PublishError> {
        let folder = parent.join(format!(".{}{SUFFIX}", Uuid::new_v4().simple()));
        DirBuilder::new().mode(0o700).create(&folder).map_err(PublishError::io("create", &folder))?;
        Ok(Self { folder, published: false })
    }

    /// Where the part of this name belongs. Parts are written there by whoever makes them.
    #[must_use]
    pub fn path(&self, part: &str) -> PathBuf {
        self.folder.join(part)
    }

    /// Makes every part last, takes its digest, and puts the folder in its place, `name`: all of it or nothing. Whoever writes
    /// parts must have finished.
    ///
    /// # Errors
    /// [`PublishError`]; there is then nothing new at `name`.
    pub fn publish(
        mut self,
        name: &Path,
        details: serde_json::Value,
        created_at: u64,
    ) -> Result<Manifest, PublishError> {
        let manifest = Manifest { format: FORMAT, created_at, details, parts: self.seal_parts()? };
        let (sealed, _) = manifest.seal().map_err(PublishError::Details)?;
        let path = self.folder.join(MANIFEST);
        let written = File::create_new(&path).and_then(|mut file| {
            file.write_all(sealed.as_bytes())?;
            file.sync_all()
        });
        written.map_err(PublishError::io("write", &path))?;
        sync_folder(&self.folder).map_err(PublishError::io("sync", &self.folder))?;

        match rustix::fs::renameat_with(CWD, &self.folder, CWD, name, RenameFlags::NOREPLACE) {
            Ok(()) => self.published = true,
            Err(Errno::EXIST | Errno::NOTEMPTY) => return Err(PublishError::Exists { path: name.into() }),
            Err(errno) => return Err(PublishError::io("rename the snapshot to", name)(errno.into())),
        }
        let parent = folder_of(name);
        sync_folder(parent).map_err(PublishError::io("sync", parent))?;
        Ok(manifest)
    }

    fn seal_parts(&self) -> Result<BTreeMap<String, Part>, PublishError> {
        let mut parts = BTreeMap::new();
        for entry in fs::read_dir(&self.folder).map_err(PublishError::io("list", &self.folder))? {
            let entry = entry.map_err(PublishError::io("list", &self.folder))?;
            let path = entry.path();
            let is_file = entry.file_type().map_err(PublishError::io("inspect", &path))?.is_file();
            match entry.file_name().into_string() {
                Ok(name) if is_file && is_part_name(&name) => {
                    let part = seal_part(&path).map_err(PublishError::io("sync and read", &path))?;
                    parts.insert(name, part);
                }
                Ok(name) => return Err(PublishError::Part { name: name.into() }),
                Err(name) => return Err(PublishError::Part { name }),
            }
        }
        Ok(parts)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.published
            && let Err(error) = fs::remove_dir_all(&self.folder)
        {
            tracing::warn!(path = %self.folder.display(), %error, "an unpublished snapshot could not be removed");
        }
    }
}

/// From now on nobody opens it for writing by accident.
fn seal_part(path: &Path) -> io::Result<Part> {
    let file = File::open(path)?;
    file.set_permissions(Permissions::from_mode(0o400))?;
    file.sync_all()?;
    Ok(Part { bytes: file.metadata()?.len(), digest: digest_file(&file)? })
}

/// Removes what killed processes left half made in `parent`, and returns how many there were. To be called while nobody else makes
/// snapshots there.
///
/// # Errors
/// [`PublishError::Io`].
pub fn sweep(parent: &Path) -> Result<usize, PublishError> {
    let mut removed = 0;
    for entry in fs::read_dir(parent).map_err(PublishError::io("list", parent))? {
        let entry = entry.map_err(PublishError::io("list", parent))?;
        let name = entry.file_name();
        let stale = name.to_str().is_some_and(|name| name.starts_with('.') && name.ends_with(SUFFIX));
        if stale && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            fs::remove_dir_all(entry.path()).map_err(PublishError::io("remove", &entry.path()))?;
            removed += 1;
        }
    }
    Ok(removed)
}
