//! Guest memory: one region, made for a boot or mapped from a snapshot's image; and what is given back of it.

pub(crate) mod discard;

mod pagemap;
mod room;
mod working_set;

use std::{ffi::CStr, fs::File, os::unix::fs::FileExt};

use nix::{
    sys::memfd::{MFdFlags, memfd_create},
    unistd::{Whence, lseek},
};
use vm_memory::GuestMemoryMmap;

pub(crate) use pagemap::Pagemap;
pub(crate) use room::Room;
pub(crate) use working_set::WorkingSet;

use crate::{
    error::{Error, Host},
    layout,
};

pub(crate) type GuestMemory = GuestMemoryMmap<()>;

/// Bytes of a page.
const PAGE: usize = 4096;
/// Bytes looked at and written at a time.
const CHUNK: usize = 1 << 20;

/// Size of the region for `mib` MiB.
fn size_of(mib: u32) -> Result<usize, Error> {
    if mib == 0 || mib > layout::MAX_MEMORY_MIB {
        return Err(Error::Refused("guest memory must be 1 to 3072 MiB"));
    }
    Ok((mib as usize) << 20)
}

/// A file for the memory of a boot: a memfd, so that pages that the guest never touched can be told from zeros without reading them.
pub(crate) fn fresh_file(mib: u32) -> Result<File, Error> {
    const NAME: &CStr = c"guest-memory";
    let file = File::from(memfd_create(NAME, MFdFlags::MFD_CLOEXEC).host("memfd_create")?);
    file.set_len(size_of(mib)? as u64).host("ftruncate of guest memory")?;
    Ok(file)
}

/// Memory without a VM, and its file; its room is never given back.
#[cfg(test)]
pub(crate) fn fresh(mib: u32) -> Result<(GuestMemory, File), Error> {
    let (room, file) = (Room::reserve(mib)?, fresh_file(mib)?);
    let memory = room.map_shared(&file)?;
    std::mem::forget(room);
    Ok((memory, file))
}

/// As `fresh`, from an image.
#[cfg(test)]
pub(crate) fn private(image: &File, mib: u32) -> Result<GuestMemory, Error> {
    let room = Room::reserve(mib)?;
    let memory = room.map_private(image)?;
    std::mem::forget(room);
    Ok(memory)
}

/// Writes fresh memory to an image of the same size. Pages of zeros become holes. Returns the bytes written.
pub(crate) fn write_image(memory: &File, image: &File) -> Result<u64, Error> {
    let size = memory.metadata().host("fstat of guest memory")?.len();
    image.set_len(size).host("ftruncate of the memory image")?;
    let mut buffer = vec![0; CHUNK];
    let (mut position, mut written) = (0, 0);
    while let Some(start) = seek(memory, position, Whence::SeekData)? {
        let end = seek(memory, start, Whence::SeekHole)?.unwrap_or(size);
        position = start;
        while position < end {
            let length = usize::try_from(end - position).unwrap_or(CHUNK).min(CHUNK);
            let chunk = &mut buffer[..length];
            memory.read_exact_at(chunk, position).host("read of guest memory")?;
            written += write_nonzero(image, chunk, position)?;
            position += length as u64;
        }
    }
    image.sync_data().host("fdatasync of the memory image")?;
    Ok(written)
}

/// Writes the runs of pages that are not all zero.
fn write_nonzero(image: &File, chunk: &[u8], at: u64) -> Result<u64, Error> {
    let is_zero = |page: &[u8]| page.iter().all(|byte| *byte == 0);
    let mut written = 0;
    let mut offset = 0;
    for run in chunk.chunks(PAGE).collect::<Vec<_>>().chunk_by(|a, b| is_zero(a) == is_zero(b)) {
        let length: usize = run.iter().map(|page| page.len()).sum();
        if !is_zero(run[0]) {
            image
                .write_all_at(&chunk[offset..offset + length], at + offset as u64)
                .host("write of the memory image")?;
            written += length as u64;
        }
        offset += length;
    }
    Ok(written)
}

fn seek(file: &File, from: u64, whence: Whence) -> Result<Option<u64>, Error> {
    let from = i64::try_from(from).map_err(|_| Error::Refused("offset out of range"))?;
    match lseek(file, from, whence) {
        Ok(found) => Ok(u64::try_from(found).ok()),
        Err(nix::errno::Errno::ENXIO) => Ok(None),
        Err(error) => Err(error).host("lseek of guest memory"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::{Bytes, GuestAddress};

    #[test]
    fn an_image_holds_what_was_written_and_holes_elsewhere() {
        let (room, file) = (Room::reserve(8).unwrap(), fresh_file(8).unwrap());
        let memory = room.map_shared(&file).unwrap();
        memory.write_slice(b"first", GuestAddress(0)).unwrap();
        memory.write_slice(b"straddles two pages", GuestAddress(0x40_0000 - 5)).unwrap();
        memory.write_slice(&[0; 4096], GuestAddress(0x10_0000)).unwrap();
        let image = tempfile::tempfile().unwrap();
        assert_eq!(write_image(&file, &image).unwrap(), 3 * 4096);

        let room = Room::reserve(8).unwrap();
        let restored = room.map_private(&image).unwrap();
        let mut expected = vec![0; 8 << 20];
        memory.read_slice(&mut expected, GuestAddress(0)).unwrap();
        let mut found = vec![1; 8 << 20];
        restored.read_slice(&mut found, GuestAddress(0)).unwrap();
        assert!(expected == found);

        restored.write_slice(b"private", GuestAddress(0)).unwrap();
        let mut byte = [0; 5];
        image.read_exact_at(&mut byte, 0).unwrap();
        assert_eq!(&byte, b"first", "a guest's write never reaches the image");
    }
}
