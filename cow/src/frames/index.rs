//! The end of the file: which frames there are, and how to tell that they are whole.

use super::{FRAME, FramesError};
use crate::Digest;

const MAGIC: [u8; 8] = *b"STASISFR";
/// Raised with every change of the file's form.
const FORMAT: u32 = 1;
/// Bytes of the tail: magic, format, entries, bytes of memory, the digest of the index and of the tail before it.
pub(super) const TAIL: usize = HEAD + 32;
const HEAD: usize = 8 + 4 + 4 + 8;

/// One frame. It lies behind those of the entries before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) frame: u32,
    /// Compressed, in bytes.
    pub(super) length: u32,
    /// Of the compressed bytes.
    pub(super) digest: Digest,
}

impl Entry {
    pub(super) const BYTES: usize = 4 + 4 + 32;
}

/// What the tail says.
#[derive(Debug)]
pub(super) struct Tail {
    pub(super) entries: u32,
    pub(super) image_bytes: u64,
    head: [u8; HEAD],
    digest: [u8; 32],
}

/// Frames of an image.
pub(super) fn frames_in(image_bytes: u64) -> Result<u32, FramesError> {
    let wrong = FramesError::Size { bytes: image_bytes };
    if image_bytes == 0 || !image_bytes.is_multiple_of(FRAME as u64) {
        return Err(wrong);
    }
    u32::try_from(image_bytes / FRAME as u64).map_err(|_| wrong)
}

/// Index and tail.
pub(super) fn seal(image_bytes: u64, entries: &[Entry]) -> (Vec<u8>, Vec<u8>) {
    let mut index = Vec::with_capacity(entries.len() * Entry::BYTES);
    for Entry { frame, length, digest } in entries {
        index.extend(frame.to_le_bytes());
        index.extend(length.to_le_bytes());
        index.extend(digest.as_bytes());
    }
    let count = u32::try_from(entries.len()).unwrap_or(u32::MAX);
    let head = [&MAGIC[..], &FORMAT.to_le_bytes(), &count.to_le_bytes(), &image_bytes.to_le_bytes()].concat();
    let digest = digest(&index, &head);
    (index, [&head[..], digest.as_bytes()].concat())
}

fn digest(index: &[u8], head: &[u8]) -> Digest {
    Digest::of(&[index, head].concat())
}

impl Tail {
    /// Reads it, without a look at the index.
    pub(super) fn parse(bytes: &[u8; TAIL]) -> Result<Self, FramesError> {
        let cut = FramesError::Index { reason: "its tail is not one" };
        let Some(rest) = bytes.strip_prefix(&MAGIC) else { return Err(cut) };
        let (Some((format, rest)), Some((head, digest))) =
            (rest.split_first_chunk::<4>(), bytes.split_first_chunk::<HEAD>())
        else {
            return Err(cut);
        };
        let format = u32::from_le_bytes(*format);
        if format != FORMAT {
            return Err(FramesError::Version { found: format, supported: FORMAT });
        }
        let Some((entries, rest)) = rest.split_first_chunk::<4>() else { return Err(cut) };
        let Some((image_bytes, _)) = rest.split_first_chunk::<8>() else { return Err(cut) };
        let digest = digest.try_into().map_err(|_| cut)?;
        let (entries, image_bytes) = (u32::from_le_bytes(*entries), u64::from_le_bytes(*image_bytes));
        Ok(Self { entries, image_bytes, head: *head, digest })
    }

    /// The entries of `index`, which must be the one that was written with this tail.
    pub(super) fn entries_of(&self, index: &[u8]) -> Result<Vec<Entry>, FramesError> {
        if digest(index, &self.head).as_bytes() != &self.digest {
            return Err(FramesError::Index { reason: "its index has another digest" });
        }
        let entry = |bytes: &[u8; Entry::BYTES]| {
            let [a, b, c, d, e, f, g, h, digest @ ..] = *bytes;
            let (frame, length) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
            Entry { frame, length, digest: Digest::from_bytes(digest) }
        };
        Ok(index.as_chunks().0.iter().map(entry).collect())
    }
}
