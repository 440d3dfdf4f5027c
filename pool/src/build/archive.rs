//! Receives a template's folder.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use futures_util::StreamExt;
use stasis_pool_api::{Archive, BuildFailure};

use super::platform;

/// Longest archive, and most bytes of an unpacked folder.
const MAX_BYTES: u64 = 512 << 20;
/// Longest `template.toml`.
const MAX_SPEC: u64 = 1 << 20;
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

    /// The text of `template.toml`. Not through a link, which may lead to a file of the host.
    pub(super) fn spec(&self) -> io::Result<String> {
        use std::os::unix::fs::OpenOptionsExt;
        let file =
            File::options().read(true).custom_flags(nix::libc::O_NOFOLLOW).open(self.path.join("template.toml"))?;
        let mut text = String::new();
        if file.take(MAX_SPEC + 1).read_to_string(&mut text)? as u64 > MAX_SPEC {
            return Err(io::Error::other(format!("it is longer than {MAX_SPEC} bytes")));
        }
        Ok(text)
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
    let path = scratch.join(crate::node::UPLOADS).join(uuid::Uuid::new_v4().simple().to_string());
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

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(entries: &[(&str, tar::EntryType, &[u8])]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, kind, content) in entries {
            let mut header = tar::Header::new_gnu();
            // Straight into the field: the builder refuses the names that an attacker would use.
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_entry_type(*kind);
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            if kind.is_symlink() || kind.is_hard_link() {
                header.set_link_name("/etc/passwd").unwrap();
            }
            header.set_cksum();
            builder.append(&header, *content).unwrap();
        }
        builder.into_inner().unwrap()
    }

    async fn receive_bytes(bytes: Vec<u8>, scratch: &Path) -> Result<Unpacked, BuildFailure> {
        let chunks = bytes.chunks(1000).map(|chunk| Ok(bytes::Bytes::copy_from_slice(chunk))).collect::<Vec<_>>();
        receive(Box::pin(futures_util::stream::iter(chunks)), scratch).await
    }

    #[tokio::test]
    async fn a_folder_arrives_and_vanishes_with_its_handle() {
        use tar::EntryType::{Directory, Regular};
        let scratch = tempfile::tempdir().unwrap();
        let bytes = archive(&[("lib", Directory, b""), ("lib/a", Regular, b"12345"), ("template.toml", Regular, b"x")]);
        let folder = receive_bytes(bytes, scratch.path()).await.unwrap();
        assert_eq!(
            (std::fs::read(folder.path().join("lib/a")).unwrap().as_slice(), folder.bytes()),
            (&b"12345"[..], 6)
        );
        let path = folder.path().to_owned();
        drop(folder);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn nothing_lands_outside_and_nothing_strange_comes_in() {
        use tar::EntryType::{Char, Fifo, Link, Regular, Symlink};
        let scratch = tempfile::tempdir().unwrap();
        let outside = scratch.path().join("evil");
        for (name, entries) in [
            ("parent", vec![("../../evil", Regular, &b"x"[..])]),
            ("through a link", vec![("out", Symlink, b""), ("out/evil", Regular, b"x")]),
            ("hard link", vec![("out", Link, b"")]),
            ("device", vec![("dev", Char, b"")]),
            ("fifo", vec![("pipe", Fifo, b"")]),
            ("nothing", vec![]),
        ] {
            let refused = receive_bytes(archive(&entries), scratch.path()).await;
            assert!(matches!(refused, Err(BuildFailure::Invalid { .. })), "{name}");
            assert!(!outside.exists() && !Path::new("/etc/passwd/evil").exists(), "{name}");
        }
        let link = archive(&[("template.toml", Symlink, b"")]);
        let folder = receive_bytes(link, scratch.path()).await.unwrap();
        assert!(folder.spec().is_err(), "a link is not followed to the host's files");
        drop(folder);
        assert!(matches!(receive_bytes(vec![1; 5000], scratch.path()).await, Err(BuildFailure::Invalid { .. })));
        assert_eq!(std::fs::read_dir(scratch.path().join(crate::node::UPLOADS)).unwrap().count(), 0);
    }
}
