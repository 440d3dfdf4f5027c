//! Copies that cost nothing, because they share their blocks, and the one explicit copy that brings a file in.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
};
use uuid::Uuid;

use crate::sparse::for_each_data;

/// Why a file was not cloned or imported.
#[derive(Debug, thiserror::Error)]
pub enum CloneError {
    /// The file systems cannot share blocks. Nothing was copied instead.
    #[error(
        "cannot clone into {path:?} without copying: keep source and clone on one XFS or btrfs file system with reflink"
    )]
    NoReflink {
        /// The clone that is not there.
        path: PathBuf,
        /// The kernel's refusal.
        #[source]
        source: io::Error,
    },
    /// The clone's place is taken.
    #[error("{path:?} is already there: a clone replaces nothing")]
    Exists {
        /// What is there.
        path: PathBuf,
    },
    /// A file could not be opened, read, written or renamed.
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

/// Makes `target`, a new file that shares all blocks with `source` until either is written to.
///
/// # Errors
/// [`CloneError::NoReflink`] where sharing is impossible; `target` is then not there.
pub fn clone_file(source: &File, target: &Path) -> Result<File, CloneError> {
    let clone = match private_file().read(true).create_new(true).open(target) {
        Ok(clone) => clone,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(CloneError::Exists { path: target.into() });
        }
        Err(source) => return Err(CloneError::Io { action: "create", path: target.into(), source }),
    };
    let Err(errno) = rustix::fs::ioctl_ficlone(&clone, source) else { return Ok(clone) };
    if let Err(error) = fs::remove_file(target) {
        tracing::warn!(path = %target.display(), %error, "the place of a failed clone could not be freed");
    }
    Err(clone_error(errno, target))
}

/// Makes a clone without a name, in the file system of `folder`: it is gone when its last descriptor closes, whatever ends its owner.
///
/// # Errors
/// [`CloneError::NoReflink`] where sharing is impossible.
pub fn clone_nameless(source: &File, folder: &Path) -> Result<File, CloneError> {
    let clone = nameless(folder)?;
    match rustix::fs::ioctl_ficlone(&clone, source) {
        Ok(()) => Ok(clone),
        Err(errno) => Err(clone_error(errno, folder)),
    }
}

/// Makes `clone`, a clone of `source` that was written to, equal to it again. What was written is gone, from the page cache too.
///
/// # Errors
/// The kernel's refusal; the clone's contents are then unknown.
pub fn reset_clone(clone: &File, source: &File) -> io::Result<()> {
    rustix::fs::ioctl_ficlone(clone, source)?;
    // A clone is never shorter than its source, but it might have been made longer.
    let length = source.metadata()?.len();
    if clone.metadata()?.len() == length { Ok(()) } else { clone.set_len(length) }
}

/// Makes an empty file without a name in the file system of `folder`.
///
/// # Errors
/// [`CloneError::Io`], with the kernel's refusal.
pub fn nameless(folder: &Path) -> Result<File, CloneError> {
    let named = |errno: Errno| CloneError::Io {
        action: "create a nameless file in",
        path: folder.into(),
        source: errno.into(),
    };
    open_nameless(folder).map_err(named)
}

fn open_nameless(folder: &Path) -> Result<File, Errno> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR).map(File::from)
}

fn clone_error(errno: Errno, target: &Path) -> CloneError {
    let source = io::Error::from(errno);
    match errno {
        Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY | Errno::NOSYS => {
            CloneError::NoReflink { path: target.into(), source }
        }
        _ => CloneError::Io { action: "clone into", path: target.into(), source },
    }
}

/// Whether files in `dir` can share blocks: found out by an attempt on two nameless files.
///
/// # Errors
/// Whatever keeps the attempt from being made.
pub fn supports_reflink(dir: &Path) -> io::Result<bool> {
    let source = match open_nameless(dir) {
        Ok(file) => file,
        // Every file system with reflink has nameless files.
        Err(Errno::OPNOTSUPP) => return Ok(false),
        Err(errno) => return Err(errno.into()),
    };
    source.write_all_at(&[0x5a; 4096], 0)?;
    match rustix::fs::ioctl_ficlone(open_nameless(dir)?, &source) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOTTY | Errno::NOSYS) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Copies `source` to `target`, holes as holes. `target` appears, or is replaced, at once and complete.
/// `progress` is told how many bytes of how many are done.
///
/// # Errors
/// [`CloneError::Io`], which says at which file; `target` is then as before.
pub fn import(source: &Path, target: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<(), CloneError> {
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| CloneError::Io { action, path, source }
    };
    let folder = folder_of(target);
    let partial = folder.join(format!(".{}.partial", Uuid::new_v4().simple()));
    let input = File::open(source).map_err(failed("open", source))?;
    let output = private_file().create_new(true).open(&partial).map_err(failed("create", &partial))?;
    let copied = copy_sparse(&input, &output, progress)
        .and_then(|()| output.sync_all())
        .map_err(failed("copy to", target))
        .and_then(|()| fs::rename(&partial, target).map_err(failed("rename to", target)));
    if let Err(error) = copied {
        if let Err(error) = fs::remove_file(&partial) {
            tracing::warn!(path = %partial.display(), %error, "a partial copy could not be removed");
        }
        return Err(error);
    }
    sync_folder(folder).map_err(failed("sync", folder))
}

/// Makes `file` at least `bytes` long, and returns its length. It never becomes shorter.
///
/// # Errors
/// The system call's.
pub fn grow(file: &File, bytes: u64) -> io::Result<u64> {
    let length = file.metadata()?.len();
    if bytes > length {
        file.set_len(bytes)?;
    }
    Ok(length.max(bytes))
}

/// The folder that a path's last component is in.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Makes the names in a folder last.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

fn private_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    options
}

fn copy_sparse(input: &File, output: &File, progress: &mut dyn FnMut(u64, u64)) -> io::Result<()> {
    let total = input.metadata()?.len();
    output.set_len(total)?;
    for_each_data(input, 1, |at, bytes| {
        output.write_all_at(bytes, at)?;
        progress(at + bytes.len() as u64, total);
        Ok(())
    })?;
    progress(total, total);
    Ok(())
}

#[cfg(test)]
mod tests;
