//! A template's memory in a memfd, filled frame by frame.

use std::{fs::File, io, os::unix::fs::FileExt};

use stasis_cow::{FRAME, Frames};
use stasis_vmm_api::pager::ImageFormat;

use crate::error::{Error, Host};

/// As many bytes as [`FRAME`].
const FRAME_BYTES: u32 = 64 << 10;
const _: () = assert!(FRAME_BYTES as usize == FRAME);

/// The memory, as far as it is there.
#[derive(Debug)]
pub(super) struct Store {
    source: Source,
    memory: File,
    /// By frame.
    filled: Vec<bool>,
    content: Box<[u8; FRAME]>,
    bytes_read: u64,
}

#[derive(Debug)]
enum Source {
    Raw(File),
    Frames(Box<Frames>),
}

impl Store {
    /// Of an image and an empty memfd of its memory's size.
    pub(super) fn open(format: ImageFormat, image: File, memory: File) -> Result<Self, Error> {
        let size = memory.metadata().host("fstat of the pager's memory")?.len();
        let (source, expected) = match format {
            ImageFormat::Raw => {
                let bytes = image.metadata().host("fstat of the memory image")?.len();
                (Source::Raw(image), bytes)
            }
            ImageFormat::Frames => {
                let frames = Frames::open(image)?;
                let bytes = frames.image_bytes();
                (Source::Frames(Box::new(frames)), bytes)
            }
        };
        if size != expected || !size.is_multiple_of(FRAME as u64) {
            return Err(Error::Snapshot(format!("the memory image has {expected} bytes, the machine {size}")));
        }
        let frames = usize::try_from(size / FRAME as u64).unwrap_or(usize::MAX);
        Ok(Self { source, memory, filled: vec![false; frames], content: Box::new([0; FRAME]), bytes_read: 0 })
    }

    /// Bytes of the memory.
    pub(super) fn bytes(&self) -> u64 {
        self.filled.len() as u64 * FRAME as u64
    }

    /// How many frames it has.
    pub(super) fn frames(&self) -> usize {
        self.filled.len()
    }

    /// Bytes of the image's file that were read so far.
    pub(super) fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// Sees to it that a frame is in the memfd, whole: every page of it, also those of zeros. After a failure it is not, and no VM may be
    /// given any of it.
    pub(super) fn fill(&mut self, frame: u32) -> Result<(), Error> {
        let Some(filled) = self.filled.get_mut(frame as usize) else {
            return Err(Error::Refused("a frame outside the memory"));
        };
        if *filled {
            return Ok(());
        }
        let at = u64::from(frame) * FRAME as u64;
        let read = match &mut self.source {
            Source::Frames(frames) => frames.read(frame, &mut self.content)?,
            Source::Raw(image) => match image.read_exact_at(&mut self.content[..], at) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(Error::Snapshot("the memory image is cut: build its template again".into()));
                }
                other => other.host("read of the memory image").map(|()| FRAME_BYTES)?,
            },
        };
        self.memory.write_all_at(&self.content[..], at).host("write of the pager's memory")?;
        self.bytes_read += u64::from(read);
        *filled = true;
        Ok(())
    }
}
