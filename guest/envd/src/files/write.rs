//! Files as they are written.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, chown, fchown},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use http::{HeaderMap, StatusCode};
use rustix::fs::OFlags;
use serde::Serialize;

use crate::{answer::Refusal, files::PIECE, folders, metadata, users::User};

/// Notes of a file come in headers that begin so.
const NOTE: &str = "x-metadata-";
/// Most bytes of all notes' names and values.
const MOST_NOTES: usize = 4096;
/// Most bytes of a note's name: the system's 255 less our prefix.
const LONGEST_NAME: usize = 246;

/// What was written.
#[derive(Debug, Serialize)]
pub(super) struct Written {
    pub(super) path: PathBuf,
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

impl Written {
    pub(super) fn new(path: PathBuf, metadata: BTreeMap<String, String>) -> Self {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self { path, name, kind: "file", metadata }
    }
}

/// How files are to be written.
#[derive(Debug, Clone)]
pub(super) struct How {
    pub(super) user: User,
    pub(super) notes: BTreeMap<String, String>,
    /// What the request says that it brings.
    pub(super) length: Option<u64>,
}

impl How {
    /// All that arrives, into the file at `path`. The first piece is written when it is full or all is there, so that a watch sees a small
    /// file created, changed in its owner, and written: once each.
    pub(super) async fn write<E: std::fmt::Display>(
        &self,
        path: PathBuf,
        mut bytes: impl Stream<Item = Result<Bytes, E>> + Unpin,
    ) -> Result<Written, Refusal> {
        let (user, place) = (self.user.clone(), path.clone());
        let mut file = blocking(move || create(&place, &user)).await?;
        let mut piece = Vec::new();
        loop {
            let arrived = bytes.next().await.transpose();
            let arrived = arrived.map_err(|error| bad(format!("error reading request body: {error}")))?;
            let is_last = arrived.is_none();
            piece.extend_from_slice(&arrived.unwrap_or_default());
            if piece.len() >= PIECE || is_last {
                let full = std::mem::take(&mut piece);
                let written = move || file.write_all(&full).map(|()| file).map_err(|error| unwritten(&error));
                file = blocking(written).await.map_err(|refusal| self.with_length(refusal))?;
            }
            if is_last {
                break;
            }
        }
        let notes = self.notes.clone();
        let noted = move || metadata::replace(&file, &notes).map_err(|error| unwritten(&error));
        blocking(noted).await?;
        Ok(Written::new(path, self.notes.clone()))
    }

    fn with_length(&self, refusal: Refusal) -> Refusal {
        match self.length {
            Some(length) if refusal.status == StatusCode::INSUFFICIENT_STORAGE => {
                Refusal::new(refusal.status, format!("attempted to write {length} bytes: {}", refusal.message))
            }
            _ => refusal,
        }
    }
}

/// The notes that a request brings.
pub(super) fn notes(headers: &HeaderMap) -> Result<BTreeMap<String, String>, Refusal> {
    let mut notes = BTreeMap::new();
    for (name, value) in headers {
        let Some(key) = name.as_str().strip_prefix(NOTE) else { continue };
        let value = str::from_utf8(value.as_bytes()).map_err(|_| bad(format!("metadata '{key}' is not UTF-8")))?;
        if key.is_empty() || key.len() > LONGEST_NAME {
            return Err(bad(format!("a metadata key has 1 to {LONGEST_NAME} bytes")));
        }
        notes.insert(key.to_owned(), value.to_owned());
    }
    if notes.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>() > MOST_NOTES {
        return Err(bad(format!("metadata has more than {MOST_NOTES} bytes")));
    }
    Ok(notes)
}

/// An empty file of mode 0644, or the one that is there, emptied; the user's, as are the folders that were missing.
fn create(path: &Path, user: &User) -> Result<File, Refusal> {
    if let Some(folder) = path.parent() {
        folders::ensure(folder, user).map_err(|error| unwritten(&error))?;
    }
    let exists = match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => true,
        Ok(metadata) if metadata.is_dir() => return Err(bad(format!("path is a directory: {}", path.display()))),
        Ok(_) => return Err(bad(format!("path is not a regular file: {}", path.display()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(unwritten(&error)),
    };
    if exists {
        chown(path, Some(user.uid), Some(user.gid)).map_err(|error| unwritten(&error))?;
    }
    let file = open(path).map_err(|error| unwritten(&error))?;
    if !exists {
        fchown(&file, Some(user.uid), Some(user.gid)).map_err(|error| unwritten(&error))?;
    }
    Ok(file)
}

/// Not waiting for a reader, should it have become a pipe meanwhile.
pub(super) fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).custom_flags(flags).open(path)
}

pub(super) fn bad(message: String) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, message)
}

/// Why something could not be written.
pub(super) fn unwritten(error: &io::Error) -> Refusal {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Refusal::new(StatusCode::INSUFFICIENT_STORAGE, "not enough disk space available")
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::InvalidFilename | io::ErrorKind::InvalidInput => {
            bad(format!("error writing file: {error}"))
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            Refusal::new(StatusCode::FORBIDDEN, format!("error writing file: {error}"))
        }
        _ => Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, format!("error writing file: {error}")),
    }
}

/// On a thread that may block.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?
}
