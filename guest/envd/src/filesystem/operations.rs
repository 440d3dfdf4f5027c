//! What is done to files. All of it blocks.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::io::Errno;

use crate::{
    connect::{Code, RpcError},
    filesystem::entry::Entry,
    folders,
    users::{User, Users},
};

fn failed(what: &str, error: &io::Error) -> RpcError {
    let code = match error.kind() {
        io::ErrorKind::NotFound => Code::NotFound,
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Code::PermissionDenied,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Code::ResourceExhausted,
        io::ErrorKind::NotADirectory
        | io::ErrorKind::InvalidInput
        | io::ErrorKind::InvalidFilename
        | io::ErrorKind::IsADirectory => Code::InvalidArgument,
        io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::CrossesDevices | io::ErrorKind::ResourceBusy => {
            Code::FailedPrecondition
        }
        _ if error.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => Code::InvalidArgument,
        _ => Code::Internal,
    };
    RpcError::new(code, format!("{what}: {error}"))
}

pub(super) fn stat(path: &Path, users: &Users) -> Result<Entry, RpcError> {
    Entry::read(path, users).map_err(|error| failed("file not found", &error))
}

/// What is below `path`, `depth` deep, each folder before what is in it, in the order of the names. Links are not followed but for `path`.
pub(super) fn list(path: &Path, depth: u32, users: &Users) -> Result<Vec<Entry>, RpcError> {
    let folder = fs::canonicalize(path).map_err(|error| failed("path not found", &error))?;
    if !folder.is_dir() {
        return Err(RpcError::invalid(format!("path is not a directory: {}", folder.display())));
    }
    let mut entries = Vec::new();
    // Folders that are to be read, the next one last: their own path may be far longer than the stack is deep.
    let mut waiting: Vec<(PathBuf, u32)> =
        children(path).map_err(|error| failed("error reading directory", &error))?.map(|child| (child, 1)).collect();
    while let Some((child, at)) = waiting.pop() {
        // What vanished meanwhile is not there.
        let Ok(entry) = Entry::read(&child, users) else { continue };
        entries.push(entry);
        if at < depth.max(1)
            && fs::symlink_metadata(&child).is_ok_and(|metadata| metadata.is_dir())
            && let Ok(below) = children(&child)
        {
            waiting.extend(below.map(|child| (child, at + 1)));
        }
    }
    Ok(entries)
}

/// What is in a folder, the last name first.
fn children(folder: &Path) -> io::Result<impl Iterator<Item = PathBuf>> {
    let mut children: Vec<PathBuf> = fs::read_dir(folder)?.flatten().map(|entry| entry.path()).collect();
    children.sort();
    Ok(children.into_iter().rev())
}

pub(super) fn make(path: &Path, user: &User, users: &Users) -> Result<Entry, RpcError> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            return Err(RpcError::new(Code::AlreadyExists, format!("directory already exists: {}", path.display())));
        }
        Ok(_) => {
            let message = format!("path already exists but it is not a directory: {}", path.display());
            return Err(RpcError::invalid(message));
        }
        Err(_) => folders::ensure(path, user).map_err(|error| failed("error creating directory", &error))?,
    }
    stat(path, users)
}

pub(super) fn rename(source: &Path, destination: &Path, user: &User, users: &Users) -> Result<Entry, RpcError> {
    fs::symlink_metadata(source).map_err(|error| failed("source file not found", &error))?;
    if let Some(folder) = destination.parent() {
        folders::ensure(folder, user).map_err(|error| failed("error creating directory", &error))?;
    }
    fs::rename(source, destination).map_err(|error| failed("error renaming", &error))?;
    stat(destination, users)
}

/// With all that is below. What is not there is gone already.
pub(super) fn remove(path: &Path) -> Result<(), RpcError> {
    let removed = fs::symlink_metadata(path)
        .and_then(|metadata| if metadata.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) });
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(failed("error removing file or directory", &error))
        }
        _ => Ok(()),
    }
}

/// Whether what is at `path` comes over a network, where no kernel tells what others do.
pub(super) fn is_on_network(path: &Path) -> io::Result<bool> {
    /// NFS, CIFS, SMB, SMB2 and FUSE, by `linux/magic.h`.
    const NETWORKS: [u64; 5] = [0x6969, 0xff53_4d42, 0x517b, 0xfe53_4d42, 0x6573_5546];
    let kind = rustix::fs::statfs(path)?.f_type;
    Ok(NETWORKS.contains(&(kind.cast_unsigned() & 0xffff_ffff)))
}

/// The folder that is to be watched.
pub(super) fn check_watched(path: &Path, allow_network: bool) -> Result<(), RpcError> {
    let metadata = fs::metadata(path).map_err(|error| failed(&format!("path {} not found", path.display()), &error))?;
    if !metadata.is_dir() {
        return Err(RpcError::invalid(format!("path {} not a directory", path.display())));
    }
    if !allow_network && is_on_network(path).map_err(|error| failed("error checking mount status", &error))? {
        return Err(RpcError::invalid(format!("cannot watch path on network filesystem: {}", path.display())));
    }
    Ok(())
}
