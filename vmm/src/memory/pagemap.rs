//! Which pages of a private mapping are its own: those that were written, and so are no longer the file's.
//!
//! The kernel knows, without any log that would cost the guest something (`PAGEMAP_SCAN`, Linux 6.7,
//! Documentation/admin-guide/mm/pagemap.rst).

use std::{fs::File, io, ops::Range};

use vmm_sys_util::{ioctl::ioctl_with_mut_ref, ioctl_iowr_nr};

use crate::error::{Error, Host};

/// `struct pm_scan_arg` of `linux/fs.h`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of `linux/fs.h`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

ioctl_iowr_nr!(PAGEMAP_SCAN, b'f' as u32, 16, Scan);

/// Arms what is found, in the same step: of memory that [`crate::uffd::Uffd`] has registered.
const PM_SCAN_WP_MATCHING: u64 = 1 << 0;
const PM_SCAN_CHECK_WPASYNC: u64 = 1 << 1;
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
/// Regions that one call can return; more need more calls.
const REGIONS: usize = 1024;

/// The page tables of this process, as the kernel shows them.
#[derive(Debug)]
pub struct Pagemap(File);

impl Pagemap {
    /// Those of the process that calls this; a child made by fork has others.
    ///
    /// # Errors
    /// Where there is no `/proc`.
    pub fn of_this_process() -> Result<Self, Error> {
        File::open("/proc/self/pagemap").map(Self).host("open of /proc/self/pagemap")
    }

    /// The private pages in `addresses`, as ascending ranges that neither touch nor overlap.
    pub(crate) fn private_pages(&self, addresses: Range<u64>) -> Result<Vec<Range<u64>>, Error> {
        self.scan(addresses, 0, 0)
    }

    /// The private pages in `addresses` that were written since this was last asked, or ever, if it was not; their next write will be noted. As
    /// [`Pagemap::private_pages`] otherwise. All of it must be registered for write protection.
    pub(crate) fn take_written(&self, addresses: Range<u64>) -> Result<Vec<Range<u64>>, Error> {
        self.written_of(addresses, PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC)
    }

    /// As [`Pagemap::take_written`], but nothing is taken: the next write of what is found will not be noted.
    pub(crate) fn written(&self, addresses: Range<u64>) -> Result<Vec<Range<u64>>, Error> {
        self.written_of(addresses, PM_SCAN_CHECK_WPASYNC)
    }

    /// In two looks. The first finds all that is not protected, private or not: for this question alone the kernel has a way that reads nothing but
    /// page tables. Protecting only what it found also leaves KVM's mappings of the rest as they are. What is written in between
    /// and was protected is noted, for the next time.
    fn written_of(&self, addresses: Range<u64>, flags: u64) -> Result<Vec<Range<u64>>, Error> {
        let look = Scan {
            flags: PM_SCAN_CHECK_WPASYNC,
            category_mask: PAGE_IS_WRITTEN,
            return_mask: PAGE_IS_WRITTEN,
            ..Scan::default()
        };
        let mut found = Vec::new();
        for range in self.regions(addresses, &look)? {
            found.extend(self.scan(range, PAGE_IS_WRITTEN, flags)?);
        }
        Ok(found)
    }

    /// The private pages that are of all these categories too.
    fn scan(&self, addresses: Range<u64>, categories: u64, flags: u64) -> Result<Vec<Range<u64>>, Error> {
        let private = Scan {
            flags,
            category_inverted: PAGE_IS_FILE,
            category_mask: PAGE_IS_FILE | categories,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            ..Scan::default()
        };
        self.regions(addresses, &private)
    }

    /// What `what` asks for.
    fn regions(&self, addresses: Range<u64>, what: &Scan) -> Result<Vec<Range<u64>>, Error> {
        let mut found: Vec<Range<u64>> = Vec::new();
        let mut regions = vec![Region::default(); REGIONS];
        let mut start = addresses.start;
        while start < addresses.end {
            let mut scan = Scan {
                size: size_of::<Scan>() as u64,
                start,
                end: addresses.end,
                vec: regions.as_mut_ptr() as u64,
                vec_len: REGIONS as u64,
                ..*what
            };
            // SAFETY: `scan` is the struct that this ioctl takes, and its vector has room for the regions it speaks of.
            let count = unsafe { ioctl_with_mut_ref(&self.0, PAGEMAP_SCAN(), &mut scan) };
            let count = usize::try_from(count).map_err(|_| io::Error::last_os_error()).host("PAGEMAP_SCAN")?;
            for region in regions.iter().take(count) {
                // A scan that is taken up again may tell of its last region once more.
                match found.last_mut() {
                    Some(last) if region.start <= last.end => last.end = last.end.max(region.end),
                    _ => found.push(region.start..region.end),
                }
            }
            if scan.walk_end <= start {
                return Err(io::Error::other("the scan does not move on")).host("PAGEMAP_SCAN");
            }
            start = scan.walk_end;
        }
        Ok(found)
    }
}
