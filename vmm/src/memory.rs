//! Guest memory: one region, made for a boot or mapped from a snapshot's image; and what is given back of it.

pub(crate) mod discard;
mod flush;
mod image;
mod paged;
mod pagemap;
mod room;
mod working_set;

use std::{ffi::CStr, fs::File};

use nix::{
    fcntl::{FallocateFlags, fallocate},
    sys::memfd::{MFdFlags, memfd_create},
};
use vm_memory::GuestMemoryMmap;

pub(crate) use flush::Flush;
pub(crate) use image::{write_changes, write_image};
pub(crate) use paged::{Paged, Prepared};
pub use pagemap::Pagemap;
pub(crate) use room::Room;
pub(crate) use working_set::WorkingSet;

use crate::{
    error::{Error, Host},
    layout,
};

pub(crate) type GuestMemory = GuestMemoryMmap<()>;

/// Bytes of a page.
const PAGE: usize = 4096;

/// Size of the region for `mib` MiB.
fn size_of(mib: u32) -> Result<usize, Error> {
    if mib == 0 || mib > layout::MAX_MEMORY_MIB {
        return Err(Error::Refused("guest memory must be 1 to 3072 MiB"));
    }
    Ok((mib as usize) << 20)
}

/// Makes a hole in a file of guest memory: no blocks, and zeros to read.
pub(crate) fn punch(file: &File, at: u64, length: u64) -> Result<(), Error> {
    let (Ok(at), Ok(length)) = (i64::try_from(at), i64::try_from(length)) else {
        return Err(Error::Refused("offset out of range"));
    };
    let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(file, mode, at, length).host("fallocate of guest memory")
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
