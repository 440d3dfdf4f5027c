//! How the kernel tells which pages of guest memory were written since it was last asked.
//!
//! Registered in asynchronous write-protect mode (Linux 6.7, Documentation/admin-guide/mm/userfaultfd.rst), a first write to a protected page
//! costs its writer one fault in the kernel and is noted in the page table, where [`crate::memory::Pagemap`] finds it. Nobody reads this
//! descriptor.

use std::{fs::File, io, ops::Range, os::fd::FromRawFd};

use vmm_sys_util::{ioctl::ioctl_with_ref, ioctl_ior_nr};

use super::{Addresses, UFFD, check, handshake, register};
use crate::error::{Error, Host};

ioctl_ior_nr!(UFFDIO_UNREGISTER, UFFD, 0x01, Addresses);

/// Faults of the kernel in the process's name (KVM's) need no answer here, so no privilege that would allow to delay them.
const UFFD_USER_MODE_ONLY: i32 = 1;
const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
const REGISTER_MODE_WP: u64 = 1 << 1;

/// The descriptor, after its handshake.
#[derive(Debug)]
pub(crate) struct Uffd(File);

impl Uffd {
    /// One for the memory of the calling process, whose write protection needs nobody to answer.
    pub(crate) fn write_protecting() -> Result<Self, Error> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | UFFD_USER_MODE_ONLY;
        // SAFETY: the call takes one number and touches no memory.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error);
        // SAFETY: the kernel has just made this descriptor, and nobody else knows of it.
        let uffd = Self(unsafe { File::from_raw_fd(fd.host("userfaultfd")?) });
        handshake(&uffd.0, UFFD_FEATURE_WP_ASYNC)?;
        Ok(uffd)
    }

    /// Registers all mappings in `addresses`, which this process has, for write protection; those that are registered already stay so. No page
    /// is protected by this alone.
    pub(crate) fn register(&self, addresses: &Range<u64>) -> Result<(), Error> {
        register(&self.0, addresses, REGISTER_MODE_WP)
    }

    /// Undoes [`Uffd::register`], and all protection with it.
    pub(crate) fn unregister(&self, addresses: &Range<u64>) -> Result<(), Error> {
        // SAFETY: the argument is the struct that this ioctl reads.
        check(unsafe { ioctl_with_ref(&self.0, UFFDIO_UNREGISTER(), &Addresses::from(addresses)) }, "UFFDIO_UNREGISTER")
    }
}
