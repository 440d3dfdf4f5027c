//! Folders made on the way to a file.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, chown},
    path::Path,
};

use crate::users::User;

/// Makes `path` a folder, and those above it that are missing: of mode 0755, the user's.
pub(crate) fn ensure(path: &Path, user: &User) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Ok(()),
        Ok(_) => {
            return Err(io::Error::new(io::ErrorKind::NotADirectory, format!("path is a file: {}", path.display())));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    if let Some(above) = path.parent() {
        ensure(above, user)?;
    }
    match DirBuilder::new().mode(0o755).create(path) {
        // Somebody else made it meanwhile.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
        Ok(()) => chown(path, Some(user.uid), Some(user.gid)),
    }
}
