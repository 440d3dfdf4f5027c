//! Discard and write zeroes: ranges of sectors that need not be kept, or must read as zero.
//!
//! Both are the host's file system's work (`fallocate`). Where it does not do it, the driver hears that, and writes the zeros itself.

use std::{
    fs::File,
    io::{self, Read},
};

use nix::{
    errno::Errno,
    fcntl::{FallocateFlags, fallocate},
};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use virtio_queue::Reader;
use vm_memory::{ByteValued, Le32, Le64};

use super::SECTOR;

/// Ranges in one request at most.
const MAX_RANGES: usize = 16;
/// Longest range, in sectors: 128 MiB, so that a file system gets it done in a turn of the event loop.
const MAX_SECTORS: u32 = 1 << 18;
/// Discards make most of themselves in whole blocks of a file system: 4 KiB, in sectors.
const ALIGNMENT: u32 = 8;

/// What is to become of the sectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// They need not be kept.
    Discard,
    /// They must read as zero.
    Zero,
}

/// One range of a request (virtio 1.2, section 5.2.6).
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Range {
    sector: Le64,
    sectors: Le32,
    flags: Le32,
}

// SAFETY: eight and four and four bytes without padding, and every bit pattern is a value.
unsafe impl ByteValued for Range {}

/// Fills in the limits that the driver must keep.
pub(super) fn configure(config: &mut [u8; super::CONFIG]) {
    let ranges = u32::try_from(MAX_RANGES).unwrap_or(1);
    for (at, limit) in [(36, MAX_SECTORS), (40, ranges), (44, ALIGNMENT), (48, MAX_SECTORS), (52, ranges)] {
        config[at..at + 4].copy_from_slice(&limit.to_le_bytes());
    }
    config[56] = 1; // zeroing may unmap
}

/// Serves a request on a disk of so many sectors. All of its ranges are looked at before the first is touched.
pub(super) fn execute(file: &File, sectors: u64, how: How, from: &mut Reader<'_>) -> io::Result<u32> {
    const LENGTH: usize = size_of::<Range>();
    let length = from.available_bytes();
    if length == 0 || !length.is_multiple_of(LENGTH) || length > MAX_RANGES * LENGTH {
        return Ok(VIRTIO_BLK_S_IOERR);
    }
    let mut work = Vec::with_capacity(MAX_RANGES);
    for _ in 0..length / LENGTH {
        let mut range = Range::default();
        from.read_exact(range.as_mut_slice())?;
        let (first, count, flags) = (range.sector.to_native(), range.sectors.to_native(), range.flags.to_native());
        let may_unmap = flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
        if flags & !VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0 || how == How::Discard && may_unmap {
            return Ok(VIRTIO_BLK_S_UNSUPP);
        }
        let end = first.checked_add(u64::from(count)).filter(|end| *end <= sectors && count <= MAX_SECTORS);
        let Some(end) = end else { return Ok(VIRTIO_BLK_S_IOERR) };
        let [Ok(offset), Ok(end)] = [first, end].map(|sector| i64::try_from(sector * SECTOR)) else {
            return Ok(VIRTIO_BLK_S_IOERR);
        };
        let mode = if how == How::Discard || may_unmap {
            FallocateFlags::FALLOC_FL_PUNCH_HOLE
        } else {
            FallocateFlags::FALLOC_FL_ZERO_RANGE
        };
        if count > 0 {
            work.push((mode | FallocateFlags::FALLOC_FL_KEEP_SIZE, offset, end - offset));
        }
    }
    for (mode, offset, length) in work {
        match fallocate(file, mode, offset, length) {
            Ok(()) => {}
            Err(Errno::EOPNOTSUPP) => return Ok(VIRTIO_BLK_S_UNSUPP),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(VIRTIO_BLK_S_OK)
}

#[cfg(test)]
mod tests;
