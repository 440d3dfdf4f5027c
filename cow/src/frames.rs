//! A memory image in frames: each of 64 KiB, compressed by itself, so that any one can be had without the others.
//!
//! ```text
//!  frame │ frame │ … │ index: one entry per frame that is not zero │ tail: sizes, and the index's digest
//! ```
//!
//! Frames of zeros are not there at all. Every frame is checked against its SHA-256 each time that it is read, before it is decompressed:
//! what the file's digest in the manifest says of the moment of opening, this says of the moment of use.

mod index;
#[cfg(test)]
mod tests;

use std::{fs::File, io, os::unix::fs::FileExt};

use zstd::bulk::{Compressor, Decompressor};

use self::index::{Entry, TAIL, Tail};
use crate::{
    Digest,
    sparse::{for_each_data, is_zero},
};

/// Bytes of memory in a frame.
pub const FRAME: usize = 64 << 10;
/// zstd's own default: a higher one costs the build time, and reading gains nothing.
const LEVEL: i32 = zstd::DEFAULT_COMPRESSION_LEVEL;

/// Why a frame, or the whole image, cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum FramesError {
    /// The file cannot be read or written.
    #[error("the compressed memory image cannot be {action}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An image that is no guest's memory.
    #[error("a memory image of {bytes} bytes has no whole number of frames of {FRAME}")]
    Size {
        /// Its length.
        bytes: u64,
    },
    /// The file is not one of ours, or is cut or altered where its index is.
    #[error("this is no compressed memory image, or it is damaged: {reason}; build its template again")]
    Index {
        /// What is wrong.
        reason: &'static str,
    },
    /// The file has another version's form.
    #[error("the compressed memory image has format {found}, this stasis reads {supported}: build its template again")]
    Version {
        /// Its format.
        found: u32,
        /// Ours.
        supported: u32,
    },
    /// A frame is not what was written.
    #[error("frame {frame} of the memory image is damaged: {reason}; build its template again")]
    Damaged {
        /// Which.
        frame: u32,
        /// What is wrong.
        reason: &'static str,
    },
    /// There is no such frame.
    #[error("the memory image has no frame {frame}")]
    NoFrame {
        /// Which.
        frame: u32,
    },
}

impl FramesError {
    fn io(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, source }
    }
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FramesReport {
    /// Frames that are not zero.
    pub frames: u32,
    /// The file's length in bytes.
    pub bytes: u64,
}

/// Writes the frames of `image` to the empty file `to`, and makes them last. Moves `image`'s position.
///
/// # Errors
/// [`FramesError`]; the file is then of no use.
pub fn write_frames(image: &File, to: &File) -> Result<FramesReport, FramesError> {
    let image_bytes = image.metadata().map_err(FramesError::io("measured"))?.len();
    let count = index::frames_in(image_bytes)?;
    let mut compressor = Compressor::new(LEVEL).map_err(FramesError::io("compressed"))?;
    let mut entries: Vec<Entry> = Vec::new();
    let mut end = 0;
    let written = for_each_data(image, FRAME as u64, |at, bytes| {
        let first = u32::try_from(at / FRAME as u64).unwrap_or(count);
        for (frame, content) in (first..).zip(bytes.chunks(FRAME)).filter(|(_, content)| !is_zero(content)) {
            let packed = compressor.compress(content)?;
            to.write_all_at(&packed, end)?;
            let length = u32::try_from(packed.len()).map_err(io::Error::other)?;
            entries.push(Entry { frame, length, digest: Digest::of(&packed) });
            end += u64::from(length);
        }
        Ok(())
    });
    written.map_err(FramesError::io("written"))?;
    let (index, tail) = index::seal(image_bytes, &entries);
    to.write_all_at(&index, end).map_err(FramesError::io("written"))?;
    to.write_all_at(&tail, end + index.len() as u64).map_err(FramesError::io("written"))?;
    to.sync_all().map_err(FramesError::io("made last"))?;
    let frames = u32::try_from(entries.len()).unwrap_or(count);
    Ok(FramesReport { frames, bytes: end + (index.len() + tail.len()) as u64 })
}

/// A compressed image, open.
pub struct Frames {
    file: File,
    image_bytes: u64,
    /// By frame; none where it is zero.
    places: Vec<Option<Place>>,
    decompressor: Decompressor<'static>,
    packed: Vec<u8>,
}

/// Where a frame lies.
#[derive(Debug, Clone, Copy)]
struct Place {
    at: u64,
    length: u32,
    digest: Digest,
}

impl std::fmt::Debug for Frames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Frames")
            .field("file", &self.file)
            .field("image_bytes", &self.image_bytes)
            .finish_non_exhaustive()
    }
}

impl Frames {
    /// Reads and checks the index.
    ///
    /// # Errors
    /// [`FramesError`]: not a compressed image, cut, altered, or of another version.
    pub fn open(file: File) -> Result<Self, FramesError> {
        let length = file.metadata().map_err(FramesError::io("measured"))?.len();
        let short = FramesError::Index { reason: "it is too short" };
        let Some(tail_at) = length.checked_sub(TAIL as u64) else { return Err(short) };
        let mut tail = [0; TAIL];
        file.read_exact_at(&mut tail, tail_at).map_err(FramesError::io("read"))?;
        let tail = Tail::parse(&tail)?;
        let count = index::frames_in(tail.image_bytes)?;
        if tail.entries > count {
            return Err(FramesError::Index { reason: "it has more frames than its memory" });
        }
        let mut index = vec![0; Entry::BYTES * tail.entries as usize];
        let Some(data) = tail_at.checked_sub(index.len() as u64) else { return Err(short) };
        file.read_exact_at(&mut index, data).map_err(FramesError::io("read"))?;
        let mut places = vec![None; count as usize];
        let mut at = 0;
        for Entry { frame, length, digest } in tail.entries_of(&index)? {
            let place = places.get_mut(frame as usize).ok_or(FramesError::NoFrame { frame })?;
            *place = Some(Place { at, length, digest });
            at += u64::from(length);
        }
        if at != data {
            return Err(FramesError::Index { reason: "its frames are not all there" });
        }
        let decompressor = Decompressor::new().map_err(FramesError::io("decompressed"))?;
        Ok(Self { file, image_bytes: tail.image_bytes, places, decompressor, packed: Vec::new() })
    }

    /// Bytes of the memory.
    #[must_use]
    pub fn image_bytes(&self) -> u64 {
        self.image_bytes
    }

    /// Puts a frame's content into `content`, which is as long as a frame, and returns how many bytes of the file that took; a frame of zeros
    /// takes none.
    ///
    /// # Errors
    /// [`FramesError`]; `content` then holds nothing that may be used.
    pub fn read(&mut self, frame: u32, content: &mut [u8; FRAME]) -> Result<u32, FramesError> {
        let place = *self.places.get(frame as usize).ok_or(FramesError::NoFrame { frame })?;
        let Some(Place { at, length, digest }) = place else {
            content.fill(0);
            return Ok(0);
        };
        self.packed.resize(length as usize, 0);
        match self.file.read_exact_at(&mut self.packed, at) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(FramesError::Damaged { frame, reason: "the file is cut" });
            }
            other => other.map_err(FramesError::io("read"))?,
        }
        if Digest::of(&self.packed) != digest {
            return Err(FramesError::Damaged { frame, reason: "it has another digest" });
        }
        match self.decompressor.decompress_to_buffer(&self.packed, &mut content[..]) {
            Ok(FRAME) => Ok(length),
            Ok(_) => Err(FramesError::Damaged { frame, reason: "it has another length" }),
            Err(_) => Err(FramesError::Damaged { frame, reason: "it cannot be decompressed" }),
        }
    }
}
