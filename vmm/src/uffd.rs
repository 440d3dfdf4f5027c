//! userfaultfd, in both of its uses: a pager that answers a VM's faults ([`Faults`]), and a live snapshot that asks what was written ([`Uffd`]).
//!
//! Ioctls and structures are those of `linux/userfaultfd.h`; crates lack parts of them.

mod faults;
mod written;

use std::{fs::File, io, ops::Range};

use vmm_sys_util::{ioctl::ioctl_with_mut_ref, ioctl_iowr_nr};

pub(crate) use faults::Faults;
pub(crate) use written::Uffd;

use crate::error::{Error, Host};

/// `struct uffdio_api`.
#[derive(Debug, Default)]
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[derive(Debug, Default, Clone, Copy)]
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
const UFFD_API: u64 = 0xaa;
ioctl_iowr_nr!(UFFDIO_API, UFFD, 0x3f, Api);
ioctl_iowr_nr!(UFFDIO_REGISTER, UFFD, 0x00, Register);

impl From<&Range<u64>> for Addresses {
    fn from(addresses: &Range<u64>) -> Self {
        Self { start: addresses.start, len: addresses.end.saturating_sub(addresses.start) }
    }
}

/// The first thing that a new descriptor must hear: what it is for.
fn handshake(uffd: &File, features: u64) -> Result<(), Error> {
    let mut api = Api { api: UFFD_API, features, ioctls: 0 };
    // SAFETY: `api` is the struct that this ioctl reads and writes.
    check(unsafe { ioctl_with_mut_ref(uffd, UFFDIO_API(), &mut api) }, "UFFDIO_API")
}

fn register(uffd: &File, addresses: &Range<u64>, mode: u64) -> Result<(), Error> {
    let mut register = Register { range: addresses.into(), mode, ioctls: 0 };
    // SAFETY: `register` is the struct that this ioctl reads and writes; it changes who waits for a page of the range, and no content.
    check(unsafe { ioctl_with_mut_ref(uffd, UFFDIO_REGISTER(), &mut register) }, "UFFDIO_REGISTER")
}

fn check(result: i32, what: &'static str) -> Result<(), Error> {
    if result < 0 { Err(io::Error::last_os_error()).host(what) } else { Ok(()) }
}
