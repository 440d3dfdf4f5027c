//! A userfaultfd that is told of a private mapping's faults, and answers them from the page cache.

use std::{
    fs::File,
    io::{self, Read},
    ops::Range,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, RawFd},
};

use vmm_sys_util::{
    ioctl::{ioctl_with_mut_ref, ioctl_with_ref, ioctl_with_val},
    ioctl_io_nr, ioctl_ior_nr, ioctl_iowr_nr,
};

use super::{Addresses, UFFD, check, handshake, register};
use crate::error::Error;

#[derive(Debug, Default)]
#[repr(C)]
struct Continue {
    range: Addresses,
    mode: u64,
    mapped: i64,
}

ioctl_io_nr!(USERFAULTFD_IOC_NEW, UFFD, 0x00);
ioctl_ior_nr!(UFFDIO_WAKE, UFFD, 0x02, Addresses);
ioctl_iowr_nr!(UFFDIO_CONTINUE, UFFD, 0x07, Continue);

const UFFD_FEATURE_MISSING_SHMEM: u64 = 1 << 5;
const UFFD_FEATURE_MINOR_SHMEM: u64 = 1 << 10;
const REGISTER_MODE_MISSING: u64 = 1 << 0;
const REGISTER_MODE_MINOR: u64 = 1 << 2;
const CONTINUE_MODE_DONTWAKE: u64 = 1 << 0;
const EVENT_PAGEFAULT: u8 = 0x12;
/// Bytes of `struct uffd_msg`, and where a page fault's address is in it.
const MESSAGE: usize = 32;
const ADDRESS: Range<usize> = 16..24;
/// Faults taken at a time; more wait in the kernel.
const MESSAGES: usize = 64;
const PAGE: u64 = 4096;

/// The descriptor.
#[derive(Debug)]
pub(crate) struct Faults(File);

impl Faults {
    /// One for the memory of the calling process, from an open `/dev/userfaultfd`: with it come the faults that KVM takes for a guest,
    /// which a process without privileges may not have otherwise.
    pub(crate) fn from_device(device: &File) -> Result<Self, Error> {
        let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK).unsigned_abs().into();
        // SAFETY: this ioctl takes a number, and touches no memory of this process.
        let fd = unsafe { ioctl_with_val(device, USERFAULTFD_IOC_NEW(), flags) };
        check(fd, "USERFAULTFD_IOC_NEW")?;
        // SAFETY: the kernel has just made this descriptor, and nobody else knows of it.
        let faults = Self(unsafe { File::from_raw_fd(fd) });
        handshake(&faults.0, UFFD_FEATURE_MISSING_SHMEM | UFFD_FEATURE_MINOR_SHMEM)?;
        Ok(faults)
    }

    /// What another process handed over. Whatever else it is fails the first ioctl.
    pub(crate) fn received(file: File) -> Self {
        Self(file)
    }

    /// From now on whoever touches a page in `addresses` that is not mapped waits for an answer.
    pub(crate) fn register(&self, addresses: &Range<u64>) -> Result<(), Error> {
        register(&self.0, addresses, REGISTER_MODE_MISSING | REGISTER_MODE_MINOR)
    }

    /// Addresses of the faults that wait, as many as are taken at a time. The descriptor must not be a blocking one.
    pub(crate) fn take(&self) -> io::Result<Vec<u64>> {
        let mut messages = [0; MESSAGE * MESSAGES];
        let length = match (&self.0).read(&mut messages) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Vec::new()),
            other => other?,
        };
        let (messages, _) = messages.get(..length).unwrap_or_default().as_chunks::<MESSAGE>();
        let address = |message: &[u8; MESSAGE]| {
            let bytes = message.get(ADDRESS).and_then(|bytes| bytes.first_chunk::<8>());
            bytes.filter(|_| message[0] == EVENT_PAGEFAULT).map(|bytes| u64::from_ne_bytes(*bytes))
        };
        Ok(messages.iter().filter_map(address).collect())
    }

    /// Maps the pages of the file that are in `addresses`, all of which are in the page cache; those that are mapped already stay. Whoever
    /// waits for one goes on waiting.
    pub(crate) fn map(&self, addresses: Range<u64>) -> io::Result<()> {
        let mut at = addresses.start;
        while at < addresses.end {
            let mut part =
                Continue { range: Addresses::from(&(at..addresses.end)), mode: CONTINUE_MODE_DONTWAKE, mapped: 0 };
            // SAFETY: `part` is the struct that this ioctl reads and writes; the memory that it maps is another process's, whose
            // mapping is of the file for which it asks.
            if unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_CONTINUE(), &mut part) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            at += match error.raw_os_error() {
                Some(libc::EEXIST) => PAGE,
                Some(libc::EAGAIN) if part.mapped > 0 => part.mapped.unsigned_abs(),
                _ => return Err(error),
            };
        }
        Ok(())
    }

    /// Lets all go on that wait for a page in `addresses`.
    pub(crate) fn wake(&self, addresses: &Range<u64>) -> io::Result<()> {
        // SAFETY: the argument is the struct that this ioctl reads.
        match unsafe { ioctl_with_ref(&self.0, UFFDIO_WAKE(), &Addresses::from(addresses)) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl AsFd for Faults {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Faults {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
