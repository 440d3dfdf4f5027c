//! The XFS image beside the data directory: made, and recognised.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use crate::{clone::sync_folder, tool::MKFS_XFS};

use super::{VolumeError, free_bytes};

const GIB: u64 = 1 << 30;
/// Less is not made by default.
const LEAST_DEFAULT: u64 = 4 * GIB;
/// Less is not taken by `mkfs.xfs`.
const LEAST: u64 = 300 << 20;
const LABEL: &[u8; 12] = b"stasis\0\0\0\0\0\0";

/// The image's place, whether or not it is there yet.
#[derive(Debug)]
pub(super) struct XfsImage {
    folder: PathBuf,
    path: PathBuf,
}

impl XfsImage {
    pub(super) fn in_folder(folder: &Path) -> Self {
        Self { folder: folder.into(), path: folder.join("data.xfs") }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn exists(&self) -> bool {
        self.path.symlink_metadata().is_ok()
    }

    /// Makes the image, or checks that what is there is one.
    pub(super) fn create_if_missing(&self, bytes: Option<u64>) -> Result<(), VolumeError> {
        if self.exists() { self.recognise() } else { self.create(bytes) }
    }

    /// It gets its name when it is complete: what a killed process leaves is not taken for it.
    fn create(&self, bytes: Option<u64>) -> Result<(), VolumeError> {
        let bytes = size(&self.folder, bytes)?;
        let unfinished = self.folder.join("data.xfs.new");
        let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unfinished);
        let file = file.map_err(VolumeError::io("create", &unfinished))?;
        file.set_len(bytes).map_err(VolumeError::io("grow", &unfinished))?;
        tracing::info!(image = %self.path.display(), bytes, "making an XFS image, since the data directory has no reflink");
        let options = ["-q", "-f", "-m", "reflink=1", "-L", "stasis"];
        MKFS_XFS.run(options.iter().map(|o| o.as_ref()).chain([unfinished.as_os_str()]), &[])?;
        file.sync_all().map_err(VolumeError::io("sync", &unfinished))?;
        fs::rename(&unfinished, &self.path).map_err(VolumeError::io("rename", &unfinished))?;
        sync_folder(&self.folder).map_err(VolumeError::io("sync", &self.folder))
    }

    /// Reads the superblock: big-endian, block size at 4, number of blocks at 8, label at 108.
    fn recognise(&self) -> Result<(), VolumeError> {
        let foreign = |reason: String| Err(VolumeError::Foreign { image: self.path.clone(), reason });
        let metadata = self.path.symlink_metadata().map_err(VolumeError::io("inspect", &self.path))?;
        if !metadata.is_file() {
            return foreign("it is no regular file".into());
        }
        let mut block = [0; 120];
        let read = File::open(&self.path).and_then(|file| file.read_exact_at(&mut block, 0));
        match read {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return foreign(format!("it has only {} bytes", metadata.len()));
            }
            other => other.map_err(VolumeError::io("read", &self.path))?,
        }
        if !block.starts_with(b"XFSB") {
            return foreign("it has no XFS superblock".into());
        }
        if block[108..120] != *LABEL {
            return foreign("its label is not `stasis`".into());
        }
        let (size, count) = block[4..16].split_at(4);
        let number = |bytes: &[u8]| bytes.iter().fold(0u64, |value, byte| value << 8 | u64::from(*byte));
        let expected = number(size).saturating_mul(number(count));
        if metadata.len() < expected {
            return foreign(format!("it has {} bytes of the {expected} that its superblock names", metadata.len()));
        }
        Ok(())
    }
}

fn size(folder: &Path, asked: Option<u64>) -> Result<u64, VolumeError> {
    let free = free_bytes(folder)?;
    let bytes = match asked {
        Some(asked) if asked < LEAST => return Err(VolumeError::TooSmall { asked, least: LEAST }),
        Some(asked) => asked,
        None => (free / 5 * 4 / GIB * GIB).max(LEAST_DEFAULT),
    };
    if bytes > free {
        return Err(VolumeError::NoSpace { path: folder.into(), needed: bytes, free });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bounded_by_what_is_free() {
        let dir = tempfile::tempdir().unwrap();
        let too_much = size(dir.path(), Some(1 << 60)).unwrap_err();
        assert!(matches!(too_much, VolumeError::NoSpace { needed, free, .. } if needed == 1 << 60 && free < needed));
        assert!(matches!(size(dir.path(), Some(1)), Err(VolumeError::TooSmall { asked: 1, .. })));
        if let Ok(bytes) = size(dir.path(), None) {
            assert!(bytes >= LEAST_DEFAULT && bytes.is_multiple_of(GIB));
        }
    }

    #[test]
    fn foreign_files_are_recognised() {
        let dir = tempfile::tempdir().unwrap();
        let image = XfsImage::in_folder(dir.path());
        let mut superblock = [0; 4096];
        superblock[..4].copy_from_slice(b"XFSB");
        let reason = |content: &[u8]| {
            fs::write(image.path(), content).unwrap();
            match image.recognise() {
                Err(VolumeError::Foreign { reason, .. }) => reason,
                other => panic!("{other:?}"),
            }
        };
        assert!(reason(b"short").contains("only 5 bytes"));
        assert!(reason(&[1; 4096]).contains("no XFS superblock"));
        assert!(reason(&superblock).contains("label"));
        superblock[108..120].copy_from_slice(LABEL);
        superblock[4..16].copy_from_slice(&[0, 0, 16, 0, 0, 0, 0, 0, 0, 1, 0, 0]);
        assert!(reason(&superblock).contains("268435456"));
    }
}
