//! Guest memory given back to the host. What is given up takes no memory and reads as zero, never as what it once held.
//!
//! ```text
//! shared (a booted VM's memfd)          a hole in the file, page by page
//! private (a restored VM's image)       anonymous memory mapped over it, in whole blocks
//! ```
//!
//! On a private mapping `MADV_DONTNEED` would bring the snapshot's bytes back, so what is given up must be replaced. Every
//! replaced range costs the kernel a mapping of its own or two, of which a process may have some 65,000: therefore blocks, not
//! pages, and a bound on the [`Holes`].

mod holes;

use std::{num::NonZeroUsize, ops::Range, ptr::NonNull};

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use self::holes::Holes;
use super::{GuestMemory, PAGE, punch};
use crate::error::{Error, Host};

/// What is replaced at once in a private mapping. Even if no two neighbours' mappings could be merged, the largest memory (3 GiB)
/// has fewer blocks than a process may have mappings.
const BLOCK: u64 = 64 << 10;
/// Most separate holes in a private mapping; what would make another one stays as it is.
const MAX_HOLES: usize = 4096;

const OUTSIDE: Error = Error::Refused("memory that the VM does not have cannot be given up");

/// Gives pages of one VM's memory back.
pub(crate) struct Discard {
    /// One region in the VM's room, which outlives the devices.
    memory: GuestMemory,
    size: u64,
    file: FileOffset,
    shared: bool,
    holes: Holes,
}

impl Discard {
    /// For memory as this module's parent maps it: one region over a file.
    pub(crate) fn new(memory: &GuestMemory) -> Result<Self, Error> {
        let region = memory.iter().next().ok_or(Error::Refused("the VM has no memory"))?;
        let file = region.file_offset().ok_or(Error::Refused("guest memory is no file's"))?.clone();
        let shared = region.get_mmap().flags() & libc::MAP_SHARED != 0;
        Ok(Self { memory: memory.clone(), size: region.len(), file, shared, holes: Holes::default() })
    }

    /// Bytes of memory.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// The smallest piece, aligned to its size, that can be given up.
    pub(crate) fn block(&self) -> u64 {
        if self.shared { PAGE as u64 } else { BLOCK }
    }

    /// Gives up the whole blocks inside a range of guest addresses; the rest of it stays as it is. Returns the bytes given up.
    pub(crate) fn give_up(&mut self, range: Range<u64>) -> Result<u64, Error> {
        if range.start > range.end || range.end > self.size {
            return Err(OUTSIDE);
        }
        let block = self.block();
        let range = range.start.next_multiple_of(block)..range.end / block * block;
        if range.is_empty() {
            return Ok(0);
        }
        if self.shared { self.punch(range) } else { self.replace(range) }
    }

    /// The ranges whose pages are no longer the image's.
    pub(crate) fn holes(&self) -> &Holes {
        &self.holes
    }

    /// Maps the image over the holes again: they read as the snapshot's bytes from then on.
    pub(crate) fn fill_holes(&mut self) -> Result<(), Error> {
        while let Some(hole) = self.holes.last() {
            let (at, length) = self.place(&hole)?;
            let offset =
                i64::try_from(self.file.start() + hole.start).map_err(|_| Error::Refused("offset out of range"))?;
            let flags = MapFlags::MAP_FIXED | MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
            let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
            // SAFETY: the range lies inside the room of the VM (`place`), and its accesses by others are those of a
            // guest's memory: any bytes will do.
            unsafe { mmap(Some(at.addr()), length, protection, flags, self.file.file(), offset) }
                .host("mmap of the memory image over a hole")?;
            self.holes.pop();
        }
        Ok(())
    }

    fn punch(&self, range: Range<u64>) -> Result<u64, Error> {
        let length = range.end - range.start;
        punch(self.file.file(), self.file.start() + range.start, length)?;
        Ok(length)
    }

    fn replace(&mut self, range: Range<u64>) -> Result<u64, Error> {
        let mut given_up = 0;
        for (piece, is_hole) in self.holes.split(&range) {
            let length = piece.end - piece.start;
            if is_hole {
                self.empty(&piece)?;
            } else if self.holes.len() < MAX_HOLES || self.holes.touches(&piece) {
                self.map_anonymous(&piece)?;
                self.holes.insert(piece);
            } else {
                continue;
            }
            given_up += length;
        }
        Ok(given_up)
    }

    /// A hole is anonymous memory: there, and only there, dropped pages come back as zeros.
    fn empty(&self, hole: &Range<u64>) -> Result<(), Error> {
        let (at, length) = self.place(hole)?;
        // SAFETY: the range lies inside the room of the VM (`place`). Accesses at the same time find old bytes or
        // zeros, and both are what a guest's memory may hold.
        unsafe { madvise(at.cast(), length.get(), MmapAdvise::MADV_DONTNEED) }.host("madvise of guest memory")
    }

    /// The kernel checks what it may refuse (the number of mappings) before it takes anything away, so that a failure leaves all as it was.
    fn map_anonymous(&self, range: &Range<u64>) -> Result<(), Error> {
        let (at, length) = self.place(range)?;
        let flags = MapFlags::MAP_FIXED | MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: the range lies inside the room of the VM (`place`), whose owner unmaps it as a whole whatever it is
        // made of; the kernel swaps the pages in one step, so that an access at the same time finds old bytes or zeros.
        unsafe { mmap_anonymous(Some(at.addr()), length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags) }
            .host("mmap of anonymous memory over guest memory")?;
        Ok(())
    }

    /// Host address and length of a range, which is not empty and lies inside memory.
    fn place(&self, range: &Range<u64>) -> Result<(NonNull<u8>, NonZeroUsize), Error> {
        let length = range.end.checked_sub(range.start).and_then(|length| usize::try_from(length).ok());
        let at = self.memory.get_host_address(GuestAddress(range.start)).ok().and_then(NonNull::new);
        match (at, length.and_then(NonZeroUsize::new)) {
            (Some(at), Some(length)) if range.end <= self.size => Ok((at, length)),
            _ => Err(OUTSIDE),
        }
    }
}

#[cfg(test)]
mod tests;
