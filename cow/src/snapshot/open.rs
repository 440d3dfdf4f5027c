//! A snapshot that has been verified.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{File, OpenOptions},
    io,
    os::unix::{
        ffi::OsStringExt,
        fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    thread,
};

use rustix::{
    fs::{Dir, Mode, OFlags},
    io::Errno,
};

use crate::{Digest, digest_file};

use super::{
    MANIFEST,
    manifest::{Manifest, Part},
};

/// Why a snapshot is refused. It must then not be booted from.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The snapshot, its manifest or one of its parts is not there.
    #[error("{path:?} is missing: build the template anew")]
    Missing {
        /// What is missing.
        path: PathBuf,
    },
    /// A part is shorter than its manifest says.
    #[error("part {part} has {found} bytes instead of {expected}: build the template anew")]
    Truncated {
        /// The part.
        part: String,
        /// Bytes in the manifest.
        expected: u64,
        /// Bytes in the file.
        found: u64,
    },
    /// A part is not what was published, or not what was verified.
    #[error("part {part} was altered: build the template anew")]
    Altered {
        /// The part.
        part: String,
    },
    /// The folder has something that its manifest does not name.
    #[error("{path:?} does not belong to the snapshot: remove it, or build the template anew")]
    Unexpected {
        /// What it is.
        path: PathBuf,
    },
    /// The manifest is not what was written, or names no such part.
    #[error("the manifest is refused: {reason}")]
    Manifest {
        /// Why.
        reason: String,
    },
    /// Another version of stasis made it.
    #[error("the manifest has format {found}, but this version of stasis reads {supported}: build the template anew")]
    Version {
        /// The snapshot's.
        found: u32,
        /// Ours.
        supported: u32,
    },
    /// A file cannot be read.
    #[error("cannot read {path:?}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A verified snapshot. Its parts are held open, read-only.
#[derive(Debug)]
pub struct Snapshot {
    folder: PathBuf,
    manifest: Manifest,
    digest: Digest,
    parts: BTreeMap<String, OpenPart>,
}

#[derive(Debug)]
struct OpenPart {
    file: File,
    seen: Stamp,
}

/// What changes whenever a file's content does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    bytes: u64,
    inode: (u64, u64),
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Snapshot {
    /// Opens and verifies everything: the manifest by its own digest, the folder's names, every part's length and content. Large
    /// parts are read concurrently.
    ///
    /// # Errors
    /// [`SnapshotError`]: the snapshot is refused.
    pub fn open(folder: &Path) -> Result<Self, SnapshotError> {
        let dir = OpenOptions::new().read(true).custom_flags(OFlags::DIRECTORY.bits().cast_signed()).open(folder);
        let dir = dir.map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => SnapshotError::Missing { path: folder.into() },
            _ => SnapshotError::Io { path: folder.into(), source },
        })?;
        let (sealed, path) = (open_in(&dir, folder, MANIFEST)?, folder.join(MANIFEST));
        let sealed = io::read_to_string(sealed).map_err(|source| match source.kind() {
            io::ErrorKind::InvalidData => SnapshotError::Manifest { reason: source.to_string() },
            _ => SnapshotError::Io { path, source },
        })?;
        let (manifest, digest) = Manifest::unseal(sealed.as_bytes())?;
        no_others(&dir, folder, &manifest)?;
        let parts = verify_all(&dir, folder, &manifest)?;
        let parts = manifest.parts.keys().cloned().zip(parts).collect();
        Ok(Self { folder: folder.into(), manifest, digest, parts })
    }

    /// Where it is.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its manifest.
    #[must_use]
    pub const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its manifest's digest, and thereby that of all its parts.
    #[must_use]
    pub const fn digest(&self) -> Digest {
        self.digest
    }

    /// A part, open for reading, if nothing was written to it since it was verified. This costs one `fstat`.
    ///
    /// # Errors
    /// [`SnapshotError::Altered`], and [`SnapshotError::Manifest`] where there is no such part.
    pub fn part(&self, name: &str) -> Result<&File, SnapshotError> {
        let Some(part) = self.parts.get(name) else {
            return Err(SnapshotError::Manifest { reason: format!("it names no part {name:?}") });
        };
        let now = Stamp::of(&part.file).map_err(|source| SnapshotError::Io { path: self.folder.join(name), source })?;
        if now == part.seen { Ok(&part.file) } else { Err(SnapshotError::Altered { part: name.into() }) }
    }
}

impl Stamp {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self {
            bytes: metadata.len(),
            inode: (metadata.dev(), metadata.ino()),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

/// One thread per part, of which a snapshot has a handful.
fn verify_all(dir: &File, folder: &Path, manifest: &Manifest) -> Result<Vec<OpenPart>, SnapshotError> {
    thread::scope(|scope| {
        let spawn = |(name, part)| scope.spawn(move || verify(dir, folder, name, part));
        let threads: Vec<_> = manifest.parts.iter().map(spawn).collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(verified) => verified,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.collect()
    })
}

fn verify(dir: &File, folder: &Path, name: &String, part: &Part) -> Result<OpenPart, SnapshotError> {
    let failed = |source| SnapshotError::Io { path: folder.join(name), source };
    let file = open_in(dir, folder, name)?;
    let seen = Stamp::of(&file).map_err(failed)?;
    if seen.bytes < part.bytes {
        return Err(SnapshotError::Truncated { part: name.clone(), expected: part.bytes, found: seen.bytes });
    }
    let unaltered = seen.bytes == part.bytes
        && digest_file(&file).map_err(failed)? == part.digest
        && Stamp::of(&file).map_err(failed)? == seen;
    if unaltered { Ok(OpenPart { file, seen }) } else { Err(SnapshotError::Altered { part: name.clone() }) }
}

/// Opens a regular file of the folder: a link is not followed, a pipe not waited for.
fn open_in(dir: &File, folder: &Path, name: &str) -> Result<File, SnapshotError> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let path = folder.join(name);
    let file = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
        Ok(fd) => File::from(fd),
        Err(Errno::NOENT) => return Err(SnapshotError::Missing { path }),
        Err(Errno::LOOP) => return Err(SnapshotError::Unexpected { path }),
        Err(errno) => return Err(SnapshotError::Io { path, source: errno.into() }),
    };
    match file.metadata() {
        Ok(metadata) if metadata.is_file() => Ok(file),
        Ok(_) => Err(SnapshotError::Unexpected { path }),
        Err(source) => Err(SnapshotError::Io { path, source }),
    }
}

fn no_others(dir: &File, folder: &Path, manifest: &Manifest) -> Result<(), SnapshotError> {
    let failed = |errno: Errno| SnapshotError::Io { path: folder.into(), source: errno.into() };
    for entry in Dir::read_from(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
        let known = name
            .to_str()
            .is_some_and(|name| matches!(name, "." | "..") || name == MANIFEST || manifest.parts.contains_key(name));
        if !known {
            return Err(SnapshotError::Unexpected { path: folder.join(name) });
        }
    }
    Ok(())
}
