//! A userfaultfd of this process: how the kernel tells which pages of guest memory were written since it was last asked.
//!
//! Registered in asynchronous write-protect mode (Linux 6.7, Documentation/admin-guide/mm/userfaultfd.rst), a first write to a protected page
//! costs its writer one fault in the kernel and is noted in the page table, where [`super::Pagemap`] finds it. Nobody reads this descriptor.

use std::{fs::File, io, ops::Range, os::fd::FromRawFd};

use vmm_sys_util::{
    ioctl::{ioctl_with_mut_ref, ioctl_with_ref},
    ioctl_ior_nr, ioctl_iowr_nr,
};

use crate::error::{Error, Host};

/// `struct uffdio_api` of `linux/userfaultfd.h`.
#[derive(Debug, Default)]
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[derive(Debug, Default)]
#[repr(C)]
struct Addresses {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[derive(Debug, Default)]
#[repr(C)]
struct Register {
    range: Addresses,
    mode: u64,
    ioctls: u64,
}

const UFFD: u32 = 0xaa;
ioctl_iowr_nr!(UFFDIO_API, UFFD, 0x3f, Api);
ioctl_iowr_nr!(UFFDIO_REGISTER, UFFD, 0x00, Register);
ioctl_ior_nr!(UFFDIO_UNREGISTER, UFFD, 0x01, Addresses);

const UFFD_API: u64 = 0xaa;
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
        let mut api = Api { api: UFFD_API, features: UFFD_FEATURE_WP_ASYNC, ioctls: 0 };
        // SAFETY: `api` is the struct that this ioctl reads and writes.
        check(unsafe { ioctl_with_mut_ref(&uffd.0, UFFDIO_API(), &mut api) }, "UFFDIO_API")?;
        Ok(uffd)
    }

    /// Registers all mappings in `addresses`, which this process has, for write protection; those that are registered already stay so. No page
    /// is protected by this alone.
    pub(crate) fn register(&self, addresses: &Range<u64>) -> Result<(), Error> {
        let mut register = Register { range: of(addresses), mode: REGISTER_MODE_WP, ioctls: 0 };
        // SAFETY: `register` is the struct that this ioctl reads and writes; protected memory stays as accessible as it was.
        check(unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_REGISTER(), &mut register) }, "UFFDIO_REGISTER")
    }

    /// Undoes [`Uffd::register`], and all protection with it.
    pub(crate) fn unregister(&self, addresses: &Range<u64>) -> Result<(), Error> {
        // SAFETY: the argument is the struct that this ioctl reads.
        check(unsafe { ioctl_with_ref(&self.0, UFFDIO_UNREGISTER(), &of(addresses)) }, "UFFDIO_UNREGISTER")
    }
}

fn of(addresses: &Range<u64>) -> Addresses {
    Addresses { start: addresses.start, len: addresses.end.saturating_sub(addresses.start) }
}

fn check(result: i32, what: &'static str) -> Result<(), Error> {
    if result < 0 { Err(io::Error::last_os_error()).host(what) } else { Ok(()) }
}
