//! Everything that a kernel finds in memory and registers at its entry point.
//!
//! The 64-bit boot protocol (Documentation/arch/x86/boot.rst, "64-bit Boot Protocol"): long mode on, the first GiB mapped to
//! itself, RSI at the zero page.

mod acpi;
pub(crate) mod flat;
mod mptable;

use std::{
    fs::File,
    io::{Seek, SeekFrom},
    ops::Range,
};

use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use linux_loader::{
    bootparam::boot_params,
    cmdline::Cmdline,
    configurator::{BootConfigurator, BootParams, linux::LinuxBootConfigurator},
    loader::{KernelLoader, elf::Elf, load_cmdline},
};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryRegion};

use crate::{
    error::{Error, Host, InGuest, Ioctl},
    layout,
    memory::GuestMemory,
};

/// Values of the zero page, from the boot protocol.
const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = 0x5372_6448;
const LOADER_UNDEFINED: u8 = 0xff;
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

const PAGE: u64 = 4096;
/// Bits of a page table's entry.
const PRESENT_WRITABLE: u64 = 0x03;
const USER: u64 = 0x04;
/// The bit of RFLAGS that is always set.
const RFLAGS_ALWAYS_ONE: u64 = 2;

/// A device that the guest is to find.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    /// Guest address of its registers.
    pub(crate) registers: u64,
    /// Its interrupt line.
    pub(crate) line: u32,
}

/// Loads the kernel and its initial RAM disk, if it has one, and writes all tables. Returns the entry point.
pub(crate) fn load(
    memory: &GuestMemory,
    kernel: &mut File,
    initrd: Option<&mut File>,
    cmdline: &str,
    vcpus: u8,
    devices: &[Found],
) -> Result<GuestAddress, Error> {
    kernel.seek(SeekFrom::Start(0)).map_err(|source| Error::Host { what: "seek in the kernel image", source })?;
    let start = GuestAddress(layout::KERNEL);
    let loaded = Elf::load(memory, None, kernel, Some(start))
        .map_err(|error| Error::Kernel(format!("{error}; is it an ELF vmlinux?")))?;

    let line = Cmdline::try_from(cmdline, layout::CMDLINE_MAX).map_err(|error| Error::Cmdline(error.to_string()))?;
    load_cmdline(memory, GuestAddress(layout::CMDLINE), &line).map_err(|error| Error::Cmdline(error.to_string()))?;

    write_rng_seed(memory)?;
    let initrd = initrd.map(|file| load_initrd(memory, file, loaded.kernel_end)).transpose()?;
    let rsdp = acpi::write(memory, vcpus, devices)?;
    write_zero_page(memory, cmdline.len(), initrd, rsdp)?;
    write_page_tables(memory, PRESENT_WRITABLE)?;
    mptable::write(memory, vcpus)?;
    Ok(loaded.kernel_load)
}

/// Puts it at the end of memory, where the kernel that starts at the other end is farthest.
fn load_initrd(memory: &GuestMemory, file: &mut File, kernel_end: u64) -> Result<Range<u32>, Error> {
    const NO_ROOM: Error = Error::Refused("the initial RAM disk has no room in the guest's memory beside the kernel");
    let length = file.metadata().host("size of the initial RAM disk")?.len();
    let at = memory_end(memory).checked_sub(length).ok_or(NO_ROOM)? & !(PAGE - 1);
    if at < kernel_end {
        return Err(NO_ROOM);
    }
    file.seek(SeekFrom::Start(0)).host("seek in the initial RAM disk")?;
    let bytes = usize::try_from(length).map_err(|_| NO_ROOM)?;
    memory.read_exact_volatile_from(GuestAddress(at), file, bytes).in_guest("the initial RAM disk")?;
    let [from, to] = [at, at + length].map(u32::try_from);
    Ok(from.map_err(|_| NO_ROOM)?..to.map_err(|_| NO_ROOM)?)
}

fn write_zero_page(
    memory: &GuestMemory,
    cmdline_length: usize,
    initrd: Option<Range<u32>>,
    rsdp: u64,
) -> Result<(), Error> {
    let mut params = boot_params::default();
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.boot_flag = BOOT_FLAG;
    params.hdr.header = HEADER_MAGIC;
    params.hdr.kernel_alignment = 0x100_0000;
    params.hdr.setup_data = layout::RNG_SEED;
    params.hdr.cmd_line_ptr = u32::try_from(layout::CMDLINE).unwrap_or_default();
    params.hdr.cmdline_size = u32::try_from(cmdline_length + 1).unwrap_or_default();
    params.acpi_rsdp_addr = rsdp;
    if let Some(initrd) = initrd {
        params.hdr.ramdisk_image = initrd.start;
        params.hdr.ramdisk_size = initrd.end - initrd.start;
    }

    let end = memory_end(memory);
    let ranges = [
        (0, layout::MP_TABLE, E820_RAM),
        (layout::MP_TABLE, layout::LOW_END, E820_RESERVED),
        (layout::KERNEL, end, E820_RAM),
    ];
    for (entry, (from, to, kind)) in params.e820_table.iter_mut().zip(ranges) {
        entry.addr = from;
        entry.size = to.saturating_sub(from);
        entry.r#type = kind;
        params.e820_entries += 1;
    }
    let place = GuestAddress(layout::ZERO_PAGE);
    LinuxBootConfigurator::write_bootparams(&BootParams::new(&params, place), memory)
        .map_err(|error| Error::Kernel(format!("boot parameters: {error}")))
}

/// Host entropy for the guest's generator (`SETUP_RNG_SEED`, arch/x86/include/uapi/asm/setup_data.h): without it, a guest that has no
/// RDRAND waits for the jitter of its own clock. The kernel erases it once it has read it.
fn write_rng_seed(memory: &GuestMemory) -> Result<(), Error> {
    const SETUP_RNG_SEED: u32 = 9;
    let mut seed = [0; 64];
    rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty()).host("getrandom")?;
    let mut node = vec![0; 8]; // no next node
    node.extend(SETUP_RNG_SEED.to_le_bytes());
    node.extend(64u32.to_le_bytes());
    node.extend(seed);
    memory.write_slice(&node, GuestAddress(layout::RNG_SEED)).in_guest("the entropy seed")
}

fn memory_end(memory: &GuestMemory) -> u64 {
    use vm_memory::GuestMemoryBackend;
    memory.iter().map(|region| region.last_addr().raw_value() + 1).max().unwrap_or(0)
}

/// The first GiB, mapped to itself by 2 MiB pages.
fn write_page_tables(memory: &GuestMemory, rights: u64) -> Result<(), Error> {
    const LARGE: u64 = 0x80;
    let put = |address: u64, value: u64| memory.write_obj(value, GuestAddress(address)).in_guest("page tables");
    put(layout::PML4, layout::PDPTE | rights)?;
    put(layout::PDPTE, layout::PDE | rights)?;
    (0..512).try_for_each(|i| put(layout::PDE + i * 8, (i << 21) | rights | LARGE))
}

/// Puts a vCPU at the entry point.
pub(crate) fn enter(memory: &GuestMemory, vcpu: &VcpuFd, entry: GuestAddress) -> Result<(), Error> {
    let regs = kvm_regs {
        rflags: RFLAGS_ALWAYS_ONE,
        rip: entry.raw_value(),
        rsp: layout::STACK,
        rbp: layout::STACK,
        rsi: layout::ZERO_PAGE,
        ..Default::default()
    };
    vcpu.set_regs(&regs).ioctl("KVM_SET_REGS")?;
    enter_long_mode(memory, vcpu)?;
    wire_legacy_interrupts(vcpu)
}

/// Flat segments, paging and long mode on.
fn enter_long_mode(memory: &GuestMemory, vcpu: &VcpuFd) -> Result<(), Error> {
    const CR0_PROTECTED: u64 = 0x1;
    const CR0_PAGING: u64 = 0x8000_0000;
    const CR4_PAE: u64 = 0x20;
    const EFER_LME: u64 = 0x100;
    const EFER_LMA: u64 = 0x400;
    // Null, code (64 bit, present, execute and read), data (present, read and write), as descriptors.
    const GDT: [u64; 3] = [0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];

    for (entry, at) in GDT.iter().zip((layout::GDT..).step_by(8)) {
        memory.write_obj(*entry, GuestAddress(at)).in_guest("the GDT")?;
    }
    memory.write_obj(0u64, GuestAddress(layout::IDT)).in_guest("the IDT")?;

    let flat = kvm_segment { limit: 0xffff_ffff, present: 1, s: 1, g: 1, ..Default::default() };
    let code = kvm_segment { selector: 8, type_: 0xb, l: 1, ..flat };
    let data = kvm_segment { selector: 16, type_: 0x3, db: 1, ..flat };

    let mut sregs = vcpu.get_sregs().ioctl("KVM_GET_SREGS")?;
    sregs.gdt.base = layout::GDT;
    sregs.gdt.limit = 8 * 3 - 1;
    sregs.idt.base = layout::IDT;
    sregs.idt.limit = 7;
    sregs.cs = code;
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.cr0 |= CR0_PROTECTED | CR0_PAGING;
    sregs.cr3 = layout::PML4;
    sregs.cr4 |= CR4_PAE;
    sregs.efer |= EFER_LME | EFER_LMA;
    vcpu.set_sregs(&sregs).ioctl("KVM_SET_SREGS")
}

/// LINT0 takes the PIC's interrupts, LINT1 the NMI: what a BIOS leaves behind, and what a kernel without IOAPIC needs.
fn wire_legacy_interrupts(vcpu: &VcpuFd) -> Result<(), Error> {
    const LVT_LINT0: usize = 0x350;
    const LVT_LINT1: usize = 0x360;
    const DELIVERY_EXTINT: u8 = 7;
    const DELIVERY_NMI: u8 = 4;
    let mut lapic = vcpu.get_lapic().ioctl("KVM_GET_LAPIC")?;
    for (register, mode) in [(LVT_LINT0, DELIVERY_EXTINT), (LVT_LINT1, DELIVERY_NMI)] {
        // The delivery mode is bits 8 to 10 of the register: the low three of its second byte.
        let byte = lapic.regs[register + 1].to_ne_bytes()[0] & !7 | mode;
        lapic.regs[register + 1] = std::ffi::c_char::from_ne_bytes([byte]);
    }
    vcpu.set_lapic(&lapic).ioctl("KVM_SET_LAPIC")
}

#[cfg(test)]
mod tests;
