//! Address space for a guest's memory: reserved before it is known what the guest will find there.
//!
//! ```text
//!  reserve ──▶ nothing accessible ──map──▶ a file's pages ──drop_private──▶ the file's pages again
//! ```
//!
//! KVM's memory slot is set over the reservation once and stays: what is mapped there later, KVM finds by itself, without the grace period
//! that a change of the slot would wait for.

use std::{fs::File, io, ops::Range, os::fd::AsRawFd, ptr, sync::Arc};

use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap, mmap::MmapRegionBuilder};

use super::{GuestMemory, PAGE, size_of};
use crate::error::{Error, Host};

/// A range of addresses that is this VM's as long as this lives.
#[derive(Debug)]
pub(crate) struct Room {
    address: *mut libc::c_void,
    size: usize,
}

// SAFETY: the address is only a number here: every access to the memory goes through vm-memory's volatile accesses, or through system calls.
unsafe impl Send for Room {}
// SAFETY: as above; no method that takes `&self` reads or writes the memory behind the address.
unsafe impl Sync for Room {}

impl Room {
    /// Room for `mib` MiB.
    pub(crate) fn reserve(mib: u32) -> Result<Self, Error> {
        let size = size_of(mib)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other.
        let address = unsafe { libc::mmap(ptr::null_mut(), size, libc::PROT_NONE, flags, -1, 0) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).host("mmap of room for guest memory");
        }
        Ok(Self { address, size })
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Where it is in this process.
    pub(crate) fn addresses(&self) -> Range<u64> {
        let start = self.address as u64;
        start..start + self.size as u64
    }

    /// Pages of `image`, shared with the page cache until the guest writes them; its writes never reach the image.
    pub(crate) fn map_private(&self, image: &File) -> Result<GuestMemory, Error> {
        let length = image.metadata().host("fstat of the memory image")?.len();
        if length != self.size as u64 {
            return Err(Error::Snapshot(format!("the memory image has {length} bytes, the machine {}", self.size)));
        }
        self.map(image, libc::MAP_PRIVATE)
    }

    /// The pages of `file` themselves, which holds what the guest writes.
    pub(crate) fn map_shared(&self, file: &File) -> Result<GuestMemory, Error> {
        self.map(file, libc::MAP_SHARED)
    }

    fn map(&self, file: &File, kind: i32) -> Result<GuestMemory, Error> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = kind | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: the range is this reservation, which nothing else uses.
        let at = unsafe { libc::mmap(self.address, self.size, protection, flags, file.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).host("mmap of guest memory");
        }
        let file = FileOffset::new(file.try_clone().host("dup of the memory's file")?, 0);
        let region =
            MmapRegionBuilder::new(self.size).with_file_offset(file).with_mmap_prot(protection).with_mmap_flags(flags);
        // SAFETY: the mapping lives as long as `self`, which the VM's bus keeps beside the memory that is made here.
        let region = unsafe { region.with_raw_mmap_pointer(self.address.cast()) }.build();
        let region = region.map_err(|error| Error::Host { what: "guest memory", source: io::Error::other(error) })?;
        let region = GuestRegionMmap::new(region, GuestAddress(0))
            .ok_or(Error::Refused("guest memory does not fit the address space"))?;
        GuestMemory::from_arc_regions(vec![Arc::new(region)])
            .map_err(|error| Error::Host { what: "guest memory", source: io::Error::other(error) })
    }

    /// Gives the pages in `ranges` up: where a file is mapped privately, the next look finds the file's.
    pub(crate) fn drop_private(&self, ranges: &[Range<u64>]) -> Result<(), Error> {
        self.advise(ranges, libc::MADV_DONTNEED, "MADV_DONTNEED of guest memory")
    }

    /// Makes the pages in `ranges` private and writable now, at a thirtieth of what the guest's first write to each would cost.
    pub(crate) fn populate(&self, ranges: &[Range<u64>]) -> Result<(), Error> {
        self.advise(ranges, libc::MADV_POPULATE_WRITE, "MADV_POPULATE_WRITE of guest memory")
    }

    fn advise(&self, ranges: &[Range<u64>], advice: i32, what: &'static str) -> Result<(), Error> {
        let whole = self.addresses();
        for range in ranges {
            let inside = whole.start <= range.start && range.start <= range.end && range.end <= whole.end;
            if !inside || range.start % PAGE as u64 != 0 {
                return Err(Error::Refused("a range outside guest memory"));
            }
            let length = usize::try_from(range.end - range.start).unwrap_or(0);
            // SAFETY: the range lies in this reservation; the guest's memory is only ever read and written as bytes that may change at any time.
            if unsafe { libc::madvise(range.start as *mut libc::c_void, length, advice) } != 0 {
                return Err(io::Error::last_os_error()).host(what);
            }
        }
        Ok(())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // SAFETY: the range was reserved by `reserve`, and whoever used it has kept `self` alive until now. Only a wrong range can make it fail.
        let _ = unsafe { libc::munmap(self.address, self.size) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use vm_memory::Bytes;

    use super::*;
    use crate::{memory::Pagemap, uffd::Uffd};

    const MIB: usize = 1 << 20;

    fn image(mib: usize) -> File {
        let image = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..mib * MIB / PAGE).flat_map(|page| [u8::try_from(page % 251).unwrap(); PAGE]).collect();
        image.write_all_at(&bytes, 0).unwrap();
        image
    }

    fn all(memory: &GuestMemory, mib: usize) -> Vec<u8> {
        let mut bytes = vec![0; mib * MIB];
        memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        bytes
    }

    #[test]
    fn exactly_the_written_pages_are_private_and_dropping_them_brings_the_image_back() {
        let (room, image) = (Room::reserve(8).unwrap(), image(8));
        let memory = room.map_private(&image).unwrap();
        let pagemap = Pagemap::of_this_process().unwrap();
        let pristine = all(&memory, 8);
        let pages = |page: u64, count: u64| {
            let start = room.addresses().start + page * PAGE as u64;
            start..start + count * PAGE as u64
        };
        assert_eq!(pagemap.private_pages(room.addresses()).unwrap(), [], "reading makes none");

        // More than fit one call, then a run, then the very last.
        let scattered: Vec<_> = (0..1500).step_by(2).map(|page| pages(page, 1)).collect();
        let expected = [&scattered[..], &[pages(1600, 30), pages(2047, 1)]].concat();
        for range in &expected {
            for at in range.clone().step_by(PAGE) {
                memory.write_obj(0xeeu8, GuestAddress(at - room.addresses().start + 7)).unwrap();
            }
        }
        assert_eq!(pagemap.private_pages(room.addresses()).unwrap(), expected);
        assert!(all(&memory, 8) != pristine);

        room.drop_private(&expected).unwrap();
        assert!(all(&memory, 8) == pristine);
        assert_eq!(pagemap.private_pages(room.addresses()).unwrap(), []);

        room.populate(&expected).unwrap();
        assert_eq!(pagemap.private_pages(room.addresses()).unwrap(), expected);
        assert!(all(&memory, 8) == pristine);
    }

    #[test]
    fn what_was_written_is_told_once_and_again_after_the_next_write() {
        let (room, image) = (Room::reserve(8).unwrap(), image(8));
        let memory = room.map_private(&image).unwrap();
        let (pagemap, uffd) = (Pagemap::of_this_process().unwrap(), Uffd::write_protecting().unwrap());
        let page = |page: u64| room.addresses().start + page * PAGE as u64;
        let write = |page: u64| memory.write_obj(1u8, GuestAddress(page * PAGE as u64)).unwrap();
        let written = || pagemap.take_written(room.addresses()).unwrap();
        (3..5).for_each(write);
        assert!(pagemap.take_written(room.addresses()).is_err(), "not without registration");
        uffd.register(&room.addresses()).unwrap();
        all(&memory, 8);
        let before = page(3)..page(5);
        assert_eq!(written(), std::slice::from_ref(&before), "what was written before counts, what was read does not");
        all(&memory, 8);
        assert_eq!(written(), []);
        [4, 9].into_iter().for_each(write);
        uffd.register(&room.addresses()).unwrap(); // once more changes nothing
        for _ in 0..2 {
            let looked = pagemap.written(room.addresses()).unwrap();
            assert_eq!(looked, [page(4)..page(5), page(9)..page(10)], "looking takes nothing");
        }
        assert_eq!(written(), [page(4)..page(5), page(9)..page(10)]);
        uffd.unregister(&room.addresses()).unwrap();
        assert_eq!(pagemap.private_pages(room.addresses()).unwrap(), [before, page(9)..page(10)]);
    }

    #[test]
    fn what_is_outside_or_of_another_size_is_refused() {
        let room = Room::reserve(8).unwrap();
        let addresses = room.addresses();
        assert!(matches!(room.map_private(&image(1)), Err(Error::Snapshot(_))));
        for range in [addresses.end..addresses.end + 4096, addresses.start - 4096..addresses.end] {
            assert!(room.drop_private(&[range]).is_err());
        }
        assert!(Room::reserve(0).is_err() && Room::reserve(4096).is_err());
    }
}
