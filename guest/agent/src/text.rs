//! A line of text in a file, replaced without a write.
//!
//! An interpreted kernel takes milliseconds to write a few bytes to a file, open it where programs look, and read them back. User mode runs
//! natively, so the file's page is mapped and written there; one `stat` shows that it is still this file which programs see.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Read},
    num::NonZeroUsize,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::Path,
    slice,
    sync::atomic::{AtomicU8, Ordering},
};

use nix::sys::mman::{MapFlags, ProtFlags, mmap};

/// A text and its line feed are no longer than this.
const LONGEST: usize = 128;

/// A file with one line in it.
#[derive(Debug)]
pub struct Text {
    file: File,
    /// Its beginning. It may be touched only as far as the file is long.
    mapped: &'static [AtomicU8],
    /// Device and inode.
    identity: (u64, u64),
}

impl Text {
    /// Makes the file, for all to read. Its mapping stays for as long as this process lives.
    ///
    /// # Errors
    /// It cannot be made or mapped.
    pub fn create(path: &str, text: &str) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).truncate(true).read(true).write(true).mode(0o444).open(path)?;
        file.set_permissions(Permissions::from_mode(0o444))?;
        file.write_all_at(line(text).as_bytes(), 0)?;
        let mapped = map(&file)?;
        let metadata = file.metadata()?;
        Ok(Self { file, mapped, identity: (metadata.dev(), metadata.ino()) })
    }

    /// Replaces the text by another, usually of the same length; what is then read at `shown`, where programs look.
    ///
    /// # Errors
    /// It cannot be written or read.
    pub fn replace(&self, text: &str, shown: &Path) -> io::Result<String> {
        let line = line(text);
        let seen = fs::metadata(shown)?;
        let length = usize::try_from(seen.len()).ok();
        if (seen.dev(), seen.ino()) == self.identity
            && length == Some(line.len())
            && let Some(bytes) = self.mapped.get(..line.len())
        {
            for (to, from) in bytes.iter().zip(line.bytes()) {
                to.store(from, Ordering::Relaxed);
            }
            let read: Vec<u8> = bytes.iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
            return text_of(&read);
        }
        // Something has covered or truncated it. What is then seen is for the caller to judge.
        self.file.write_all_at(line.as_bytes(), 0)?;
        let mut buffer = [0; LONGEST];
        let count = File::open(shown)?.read(&mut buffer)?;
        text_of(&buffer[..count])
    }
}

/// What is in a file of one line.
///
/// # Errors
/// It cannot be read.
pub fn read_at_start(file: &File) -> io::Result<String> {
    let mut buffer = [0; LONGEST];
    let count = file.read_at(&mut buffer, 0)?;
    text_of(&buffer[..count])
}

/// The first [`LONGEST`] bytes of a file, shared with all who read it.
fn map(file: &File) -> io::Result<&'static [AtomicU8]> {
    let length = NonZeroUsize::new(LONGEST).ok_or(io::ErrorKind::InvalidInput)?;
    let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses replaces nothing that anybody refers to.
    let at = unsafe { mmap(None, length, rights, MapFlags::MAP_SHARED, file, 0) }?;
    // SAFETY: the mapping is LONGEST bytes long at least, readable and writable, and never unmapped. Others may change the file meanwhile, which
    // is why its bytes are atomics: these are laid out as bytes are, and any value is one of theirs.
    Ok(unsafe { slice::from_raw_parts(at.as_ptr().cast::<AtomicU8>(), LONGEST) })
}

fn line(text: &str) -> String {
    format!("{text}\n")
}

fn text_of(bytes: &[u8]) -> io::Result<String> {
    let text = str::from_utf8(bytes).map_err(io::Error::other)?;
    Ok(text.strip_suffix('\n').unwrap_or(text).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(directory: &Path) -> (Text, std::path::PathBuf) {
        let path = directory.join("id");
        (Text::create(path.to_str().unwrap(), "aaaa").unwrap(), path)
    }

    #[test]
    fn what_is_read_back_is_what_programs_see() {
        let directory = tempfile::tempdir().unwrap();
        let (text, path) = text(directory.path());
        assert_eq!(text.replace("bbbb", &path).unwrap(), "bbbb");
        assert_eq!(fs::read_to_string(&path).unwrap(), "bbbb\n");
        // Somebody has put another file in its place.
        let other = directory.path().join("other");
        fs::write(&other, "cccc\n").unwrap();
        assert_eq!(text.replace("dddd", &other).unwrap(), "cccc");
    }

    #[test]
    fn a_file_that_was_truncated_is_whole_again() {
        let directory = tempfile::tempdir().unwrap();
        let (text, path) = text(directory.path());
        text.file.set_len(0).unwrap();
        assert_eq!(text.replace("bbbb", &path).unwrap(), "bbbb");
        assert_eq!(fs::read_to_string(&path).unwrap(), "bbbb\n");
    }

    #[test]
    fn a_longer_text_is_written_whole() {
        let directory = tempfile::tempdir().unwrap();
        let (text, path) = text(directory.path());
        assert_eq!(text.replace("longer", &path).unwrap(), "longer");
        assert_eq!(fs::read_to_string(&path).unwrap(), "longer\n");
    }
}
