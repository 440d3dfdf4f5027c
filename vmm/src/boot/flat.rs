//! The tiny test guest: flat code without a kernel, which runs at full speed on any KVM.
//!
//! It is entered in user mode (CPL 3) with all of the first GiB its own and with the right to use I/O ports (IOPL 3), since some KVMs
//! interpret privileged code (docs/ARCHITECTURE.md, "Guest kernels and lanes"). What is measured with it is the host's part alone.

use std::{fs::File, io::Read, os::unix::fs::FileExt};

use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress};

use super::{PRESENT_WRITABLE, RFLAGS_ALWAYS_ONE, USER, enter_long_mode, write_page_tables};
use crate::{
    error::{Error, Host, InGuest, Ioctl},
    layout,
    memory::GuestMemory,
};

/// First bytes of a flat image, which is entered behind them.
pub const MAGIC: [u8; 8] = *b"STASFLAT";
/// Where a flat image lies in the guest's memory.
pub const LOADED_AT: u64 = layout::KERNEL;
/// Longest image, in bytes.
const LONGEST: u64 = 1 << 20;

/// Whether the file is a flat image.
pub(crate) fn is_flat(image: &File) -> bool {
    let mut head = [0; MAGIC.len()];
    image.read_exact_at(&mut head, 0).is_ok() && head == MAGIC
}

/// Loads a flat image.
pub(crate) fn load(memory: &GuestMemory, image: &mut File) -> Result<(), Error> {
    let mut bytes = Vec::new();
    image.take(LONGEST).read_to_end(&mut bytes).host("read of the flat image")?;
    memory.write_slice(&bytes, GuestAddress(LOADED_AT)).in_guest("the flat image")?;
    write_page_tables(memory, PRESENT_WRITABLE | USER)
}

/// Puts a vCPU behind the magic, in user mode.
pub(crate) fn enter(memory: &GuestMemory, vcpu: &VcpuFd) -> Result<(), Error> {
    const RFLAGS_IOPL_3: u64 = 3 << 12;
    let regs = kvm_regs {
        rflags: RFLAGS_ALWAYS_ONE | RFLAGS_IOPL_3,
        rip: LOADED_AT + MAGIC.len() as u64,
        rsp: layout::STACK,
        ..Default::default()
    };
    vcpu.set_regs(&regs).ioctl("KVM_SET_REGS")?;
    enter_long_mode(memory, vcpu)?;
    let mut sregs = vcpu.get_sregs().ioctl("KVM_GET_SREGS")?;
    let user = |segment: kvm_segment| kvm_segment { dpl: 3, selector: segment.selector | 3, ..segment };
    for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs, &mut sregs.ss] {
        *segment = user(*segment);
    }
    vcpu.set_sregs(&sregs).ioctl("KVM_SET_SREGS")
}
