//! Guest memory: one region, made for a boot or mapped from a snapshot's image; and what is given back of it.

pub(crate) mod discard;

use std::{ffi::CStr, fs::File, io, os::unix::fs::FileExt, sync::Arc};

use nix::{
    sys::memfd::{MFdFlags, memfd_create},
    unistd::{Whence, lseek},
};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    mmap::MmapRegionBuilder,
};

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

/// Fresh memory for a boot: a memfd, so that pages that the guest never touched can be told from zeros without reading them.
pub(crate) fn fresh(mib: u32) -> Result<(GuestMemory, File), Error> {
    const NAME: &CStr = c"guest-memory";
    let size = size_of(mib)?;
    let file = File::from(memfd_create(NAME, MFdFlags::MFD_CLOEXEC).host("memfd_create")?);
    file.set_len(size as u64).host("ftruncate of guest memory")?;
    let memory = map(file.try_clone().host("dup")?, size, libc::MAP_SHARED | libc::MAP_NORESERVE)?;
    Ok((memory, file))
}

/// Memory as a private mapping of a snapshot's image: pages are shared with the page cache until the guest writes them.
pub(crate) fn private(image: File, mib: u32) -> Result<GuestMemory, Error> {
    let size = size_of(mib)?;
    let length = image.metadata().host("fstat of the memory image")?.len();
    if length != size as u64 {
        return Err(Error::Snapshot(format!("the memory image has {length} bytes, the machine {size}")));
    }
    map(image, size, libc::MAP_PRIVATE | libc::MAP_NORESERVE)
}

fn map(file: File, size: usize, flags: i32) -> Result<GuestMemory, Error> {
    let mapping = MmapRegionBuilder::new(size)
        .with_file_offset(FileOffset::new(file, 0))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(flags)
        .build()
        .map_err(|error| Error::Host { what: "mmap of guest memory", source: io::Error::other(error.to_string()) })?;
    let region = GuestRegionMmap::new(mapping, GuestAddress(0))
        .ok_or(Error::Refused("guest memory does not fit the address space"))?;
    GuestMemory::from_arc_regions(vec![Arc::new(region)])
        .map_err(|error| Error::Host { what: "guest memory", source: io::Error::other(error.to_string()) })
}

/// Host address of guest physical address 0, and the size.
pub(crate) fn host_range(memory: &GuestMemory) -> Result<(u64, u64), Error> {
    let region = memory.iter().next().ok_or(Error::Refused("the VM has no memory"))?;
    Ok((region.get_mmap().as_ptr() as u64, region.len()))
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
    use vm_memory::Bytes;

    #[test]
    fn an_image_holds_what_was_written_and_holes_elsewhere() {
        let (memory, file) = fresh(8).unwrap();
        memory.write_slice(b"first", GuestAddress(0)).unwrap();
        memory.write_slice(b"straddles two pages", GuestAddress(0x40_0000 - 5)).unwrap();
        memory.write_slice(&[0; 4096], GuestAddress(0x10_0000)).unwrap();
        let image = tempfile::tempfile().unwrap();
        assert_eq!(write_image(&file, &image).unwrap(), 3 * 4096);

        let restored = private(image.try_clone().unwrap(), 8).unwrap();
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

    #[test]
    fn an_image_of_another_size_is_refused() {
        let image = tempfile::tempfile().unwrap();
        image.set_len(4096).unwrap();
        assert!(matches!(private(image, 8), Err(Error::Snapshot(_))));
        assert!(fresh(0).is_err() && fresh(4096).is_err());
    }
}
