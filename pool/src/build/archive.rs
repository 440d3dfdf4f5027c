//! Receives a template's folder.

use std::{
    fs::File,
    io::{self, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use futures_util::StreamExt;
use stasis_pool_api::{Archive, BuildFailure};

use super::platform;

/// Longest archive, and most bytes of an unpacked folder.
const MAX_BYTES: u64 = 512 << 20;
/// Most files and folders.
const MAX_ENTRIES: usize = 100_000;

/// A folder that vanishes when dropped.
pub(super) struct Unpacked {
    path: PathBuf,
    bytes: u64,
}

impl Unpacked {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "an unpacked archive could not be removed");
        }
    }
}

fn invalid(reason: impl Into<String>) -> BuildFailure {
    BuildFailure::Invalid { reason: reason.into() }
}

/// Stores the archive and unpacks it into a folder below `scratch`.
pub(super) async fn receive(mut archive: Archive, scratch: &Path) -> Result<Unpacked, BuildFailure> {
    let path = scratch.join(super::super::node::UPLOADS).join(uuid::Uuid::new_v4().simple().to_string());
    std::fs::create_dir_all(&path).map_err(platform)?;
    let mut folder = Unpacked { path, bytes: 0 };
    // Nameless: it is gone with this function.
    let mut file = nameless(&folder.path).map_err(platform)?;
    let mut received = 0;
    while let Some(chunk) = archive.next().await {
        let chunk = chunk.map_err(|error| invalid(format!("the archive broke off: {error}")))?;
        received += chunk.len() as u64;
        if received > MAX_BYTES {
            return Err(invalid(format!("the archive is over the limit of {MAX_BYTES} bytes")));
        }
        file.write_all(&chunk).map_err(platform)?;
    }
    let place = folder.path.clone();
    folder.bytes = tokio::task::spawn_blocking(move || unpack(file, &place)).await.map_err(platform)??;
    Ok(folder)
}

fn nameless(folder: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    File::options().read(true).write(true).custom_flags(nix::libc::O_TMPFILE).mode(0o600).open(folder)
}

/// Unpacks files, folders and links; anything else, and anything that would land outside, is refused.
fn unpack(mut file: File, place: &Path) -> Result<u64, BuildFailure> {
    let broken = |error: io::Error| invalid(format!("the body is not a tar archive of a folder: {error}"));
    file.seek(SeekFrom::Start(0)).map_err(platform)?;
    let mut archive = tar::Archive::new(file);
    archive.set_preserve_ownerships(false);
    let (mut bytes, mut entries) = (0u64, 0usize);
    for entry in archive.entries().map_err(broken)? {
        let mut entry = entry.map_err(broken)?;
        let name = entry.path().map_err(broken)?.display().to_string();
        let kind = entry.header().entry_type();
        if !(kind.is_file() || kind.is_dir() || kind.is_symlink() || kind.is_hard_link()) {
            return Err(invalid(format!("{name} is neither a file, a folder nor a link")));
        }
        bytes = bytes.saturating_add(entry.size());
        entries += 1;
        if bytes > MAX_BYTES || entries > MAX_ENTRIES {
            return Err(invalid(format!("the folder is over the limit of {MAX_BYTES} bytes or {MAX_ENTRIES} entries")));
        }
        if !entry.unpack_in(place).map_err(broken)? {
            return Err(invalid(format!("{name} would land outside the folder")));
        }
    }
    if entries == 0 {
        return Err(invalid("the archive is empty"));
    }
    Ok(bytes)
}
