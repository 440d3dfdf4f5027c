//! A folder as an ext4 image, made without mounting anything.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, OpenOptions},
    io,
    os::unix::{ffi::OsStrExt, fs::OpenOptionsExt},
    path::{Path, PathBuf},
};

use crate::{
    tool::{MKFS_EXT4, RESIZE2FS, ToolError},
    walk::{Entry, WalkError, walk},
};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const INODE: u64 = 256;
/// Inodes that ext4 keeps for itself.
const RESERVED_INODES: u64 = 11;
/// A link's target up to this length is kept in its inode.
const SHORT_LINK: u64 = 59;
const UUID: &str = "57a515c0-0000-4000-8000-000000000001";
const HASH_SEED: &str = "57a515c0-0000-4000-8000-000000000002";

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The folder cannot be listed.
    #[error(transparent)]
    Walk(#[from] WalkError),
    /// The image's place is taken, or cannot be written to.
    #[error("cannot create {path:?}")]
    Create {
        /// The image.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// `resize2fs` did not make it larger.
    #[error("the file system of {image:?} did not grow to {bytes} bytes")]
    Grow {
        /// The image.
        image: PathBuf,
        /// The size wanted.
        bytes: u64,
        /// Why.
        #[source]
        source: ToolError,
    },
    /// `mkfs.ext4` did not make it; the source holds what it said. A given size may be too small for the content.
    #[error("{folder:?} did not become an ext4 image of {bytes} bytes")]
    Make {
        /// The folder.
        folder: PathBuf,
        /// The image's size.
        bytes: u64,
        /// Why.
        #[source]
        source: ToolError,
    },
}

/// Makes an ext4 image, which is not mounted anywhere, as long as `bytes`, its file system with it. It never becomes smaller.
///
/// # Errors
/// [`ImageError::Grow`].
pub fn grow_ext4(image: &Path, bytes: u64) -> Result<(), ImageError> {
    let failed = |source| ImageError::Grow { image: image.into(), bytes, source };
    let file = OpenOptions::new()
        .write(true)
        .open(image)
        .map_err(|source| ImageError::Create { path: image.into(), source })?;
    let grown = crate::clone::grow(&file, bytes).map_err(|source| ImageError::Create { path: image.into(), source })?;
    // Forced, since a file system that was never mounted counts as unchecked.
    let blocks = format!("{}K", grown / 1024);
    RESIZE2FS.run([OsStr::new("-f"), image.as_os_str(), OsStr::new(&blocks)], &[]).map_err(failed)?;
    Ok(())
}

/// Makes the new file `target` an ext4 image with the content of `folder`, meant to be mounted read-only: without a journal, without
/// reserved blocks, with as many inodes as there are entries. Without a `size` it is as large as the content needs, in whole MiB.
///
/// The same folder gives the same bytes. Owners, modes and times (including inode change times, which an unpacked copy of the
/// folder does not share) are the folder's; the root directory belongs to root.
///
/// # Errors
/// [`ImageError`]; `target` is then not there.
pub fn make_ext4(folder: &Path, target: &Path, size: Option<u64>) -> Result<(), ImageError> {
    let entries = walk(folder)?;
    let bytes = size.unwrap_or_else(|| size_for(&entries));
    let create = OpenOptions::new().write(true).create_new(true).mode(0o600).open(target);
    create.map_err(|source| ImageError::Create { path: target.into(), source })?;
    let made = MKFS_EXT4.run(arguments(folder, target, &entries, bytes), &[("E2FSPROGS_FAKE_TIME", "1")]);
    made.map(drop).map_err(|source| {
        if let Err(error) = fs::remove_file(target) {
            tracing::warn!(path = %target.display(), %error, "a failed image could not be removed");
        }
        ImageError::Make { folder: folder.into(), bytes, source }
    })
}

fn arguments(folder: &Path, target: &Path, entries: &[Entry], bytes: u64) -> Vec<OsString> {
    let inodes = inodes_for(entries).to_string();
    let extended = format!("hash_seed={HASH_SEED},root_owner=0:0,nodiscard");
    let fixed = ["-q", "-F", "-m", "0", "-b", "4096", "-I", "256", "-O", "^has_journal,^resize_inode", "-U", UUID];
    let mut arguments: Vec<OsString> = fixed.map(OsString::from).into();
    arguments.extend(["-N", &inodes, "-E", &extended, "-d"].map(OsString::from));
    arguments
        .extend([folder.as_os_str(), target.as_os_str(), OsStr::new(&format!("{}k", bytes / 1024))].map(Into::into));
    arguments
}

fn inodes_for(entries: &[Entry]) -> u64 {
    entries.len() as u64 + RESERVED_INODES + 5
}

/// Content, directories and inodes, with room for bitmaps and extent blocks.
fn size_for(entries: &[Entry]) -> u64 {
    let content: u64 = entries.iter().map(content_bytes).sum();
    // A directory's record is its name and eight bytes, rounded up; index blocks and half-full leaves at most double that.
    let records: u64 = entries.iter().map(|entry| 2 * (entry.relative.as_os_str().as_bytes().len() as u64 + 16)).sum();
    let used = content + records + inodes_for(entries) * INODE + 16 * BLOCK;
    (used + used / 32 + MIB / 4).next_multiple_of(MIB)
}

fn content_bytes(entry: &Entry) -> u64 {
    let length = entry.metadata.len();
    if entry.metadata.is_dir() {
        BLOCK
    } else if entry.metadata.is_symlink() && length <= SHORT_LINK {
        0
    } else {
        length.next_multiple_of(BLOCK)
    }
}

#[cfg(test)]
mod tests;
