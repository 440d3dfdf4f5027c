//! SHA-256 of files, of folders and of labelled parts.

use std::{
    fmt,
    fs::{self, File},
    io,
    os::unix::{ffi::OsStrExt, fs::PermissionsExt},
    path::{Path, PathBuf},
    str::FromStr,
};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{
    sparse::{for_each_data, is_zero},
    walk::{WalkError, walk},
};

/// Why there is no digest.
#[derive(Debug, thiserror::Error)]
pub enum DigestError {
    /// The text is not a digest.
    #[error("{text:?} is not a SHA-256 digest: 64 lower-case hexadecimal digits are")]
    Malformed {
        /// Its first 80 characters.
        text: String,
    },
    /// The folder cannot be listed.
    #[error(transparent)]
    Walk(#[from] WalkError),
    /// A file of the folder cannot be read.
    #[error("cannot read {path:?}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The folder has a socket, a device or a named pipe, which has no content to digest.
    #[error("{path:?} is neither a file, a folder nor a symbolic link: remove it")]
    Special {
        /// What it is.
        path: PathBuf,
    },
}

/// A SHA-256 digest, shown as 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

impl Digest {
    /// Of bytes in memory.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// One that was taken before.
    pub(crate) const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its 32 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    /// Accepts one spelling only: upper-case digits are refused.
    fn from_str(text: &str) -> Result<Self, DigestError> {
        let malformed = || DigestError::Malformed { text: text.chars().take(80).collect() };
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(malformed()),
        };
        let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return Err(malformed()) };
        let bytes = pairs.iter().map(|[high, low]| Ok(digit(*high)? << 4 | digit(*low)?));
        let bytes: Vec<u8> = bytes.collect::<Result<_, DigestError>>()?;
        bytes.try_into().map(Self).map_err(|_| malformed())
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestError;

    fn try_from(text: String) -> Result<Self, DigestError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

/// Composes a digest of labelled parts. Labels and parts are prefixed with their lengths, so that no two different
/// sequences of parts feed the same bytes.
#[derive(Debug, Clone)]
pub struct Digester(Sha256);

impl Digester {
    /// Begins. `purpose` separates digests of different kinds of things.
    #[must_use]
    pub fn new(purpose: &str) -> Self {
        Self(Sha256::new()).part("", purpose.as_bytes())
    }

    /// Adds one part.
    #[must_use]
    pub fn part(mut self, label: &str, bytes: &[u8]) -> Self {
        for field in [label.as_bytes(), bytes] {
            self.0.update((field.len() as u64).to_le_bytes());
            self.0.update(field);
        }
        self
    }

    /// The digest of all parts in the order in which they were added.
    #[must_use]
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

/// Of a file's whole content. Disk and memory images are mostly zeros, so these are neither read, where they are holes, nor hashed: the
/// digest is SHA-256 over every block of 64 KiB that is not all zeros, each behind its offset, and the length. Two files
/// have the same digest exactly if they read the same, whatever of them is holes. Moves the file's position.
///
/// # Errors
/// The read's.
pub fn digest_file(file: &File) -> io::Result<Digest> {
    const BLOCK: u64 = 64 << 10;
    const END: u64 = u64::MAX;
    let mut hash = Sha256::new();
    let length = for_each_data(file, BLOCK, |at, bytes| {
        for (offset, block) in (at..).step_by(64 << 10).zip(bytes.chunks(64 << 10)) {
            if !is_zero(block) {
                hash.update(offset.to_le_bytes());
                hash.update(block);
            }
        }
        Ok(())
    })?;
    hash.update(END.to_le_bytes());
    hash.update(length.to_le_bytes());
    Ok(Digest(hash.finalize().into()))
}

/// Of all that is in a folder: names, kinds, contents, symbolic links' targets and whether a file may be executed.
/// Owners, times and the other mode bits do not count.
///
/// # Errors
/// [`DigestError`], which names the path that is in the way.
pub fn digest_folder(path: &Path) -> Result<Digest, DigestError> {
    let mut digester = Digester::new("folder");
    for entry in walk(path)? {
        let full = path.join(&entry.relative);
        let failed = |source| DigestError::Read { path: full.clone(), source };
        let kind = entry.metadata.file_type();
        digester = digester.part("path", entry.relative.as_os_str().as_bytes());
        digester = if kind.is_dir() {
            digester.part("folder", b"")
        } else if kind.is_symlink() {
            let target = fs::read_link(&full).map_err(failed)?;
            digester.part("link", target.as_os_str().as_bytes())
        } else if kind.is_file() {
            let content = File::open(&full).and_then(|file| digest_file(&file)).map_err(failed)?;
            let executable = entry.metadata.permissions().mode() & 0o111 != 0;
            digester.part(if executable { "executable" } else { "file" }, content.as_bytes())
        } else {
            return Err(DigestError::Special { path: full });
        };
    }
    Ok(digester.finish())
}

#[cfg(test)]
mod tests;
