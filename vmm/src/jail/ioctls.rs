//! Numbers of ioctls, which no crate exports, from their definitions in `linux/kvm.h` and `linux/fs.h`.

use kvm_bindings::{
    kvm_clock_data, kvm_cpuid2, kvm_debugregs, kvm_device_attr, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_msrs,
    kvm_pit_state2, kvm_regs, kvm_sregs, kvm_translation, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use vmm_sys_util::ioctl::{_IOC_NONE, _IOC_READ, _IOC_WRITE, ioctl_expr};

const KVM: u32 = 0xae;

const fn none(nr: u32) -> u64 {
    ioctl_expr(_IOC_NONE, KVM, nr, 0)
}

const fn read<T>(nr: u32) -> u64 {
    ioctl_expr(_IOC_READ, KVM, nr, size_of_argument::<T>())
}

const fn write<T>(nr: u32) -> u64 {
    ioctl_expr(_IOC_WRITE, KVM, nr, size_of_argument::<T>())
}

const fn both<T>(nr: u32) -> u64 {
    ioctl_expr(_IOC_READ | _IOC_WRITE, KVM, nr, size_of_argument::<T>())
}

/// The number's field for it has 14 bits, and the largest argument here has 4 KiB.
#[allow(clippy::cast_possible_truncation, reason = "checked by the assertion")]
const fn size_of_argument<T>() -> u32 {
    assert!(size_of::<T>() < 1 << 14);
    size_of::<T>() as u32
}

/// State of the machine beside its vCPUs: read by a snapshot, written by a restore and a rewind.
pub(super) const MACHINE_STATE: [u64; 6] = [
    both::<kvm_irqchip>(0x62),     // KVM_GET_IRQCHIP
    read::<kvm_irqchip>(0x63),     // KVM_SET_IRQCHIP, which the kernel defines as _IOR
    read::<kvm_pit_state2>(0x9f),  // KVM_GET_PIT2
    write::<kvm_pit_state2>(0xa0), // KVM_SET_PIT2
    write::<kvm_clock_data>(0x7b), // KVM_SET_CLOCK
    read::<kvm_clock_data>(0x7c),  // KVM_GET_CLOCK
];

/// Running a vCPU. The first is the one that counts.
pub(super) const VCPU_RUN: [u64; 3] = [
    none(0x80),                    // KVM_RUN
    read::<kvm_regs>(0x81),        // KVM_GET_REGS, for the report of a crash
    both::<kvm_translation>(0x85), // KVM_TRANSLATE, likewise
];

/// State of a vCPU that does not run: as that of the machine.
pub(super) const VCPU_STATE: [u64; 23] = [
    read::<kvm_regs>(0x81),         // KVM_GET_REGS
    write::<kvm_regs>(0x82),        // KVM_SET_REGS
    read::<kvm_sregs>(0x83),        // KVM_GET_SREGS
    write::<kvm_sregs>(0x84),       // KVM_SET_SREGS
    both::<kvm_msrs>(0x88),         // KVM_GET_MSRS
    write::<kvm_msrs>(0x89),        // KVM_SET_MSRS
    read::<kvm_lapic_state>(0x8e),  // KVM_GET_LAPIC
    write::<kvm_lapic_state>(0x8f), // KVM_SET_LAPIC
    write::<kvm_cpuid2>(0x90),      // KVM_SET_CPUID2
    read::<kvm_mp_state>(0x98),     // KVM_GET_MP_STATE
    write::<kvm_mp_state>(0x99),    // KVM_SET_MP_STATE
    read::<kvm_vcpu_events>(0x9f),  // KVM_GET_VCPU_EVENTS
    write::<kvm_vcpu_events>(0xa0), // KVM_SET_VCPU_EVENTS
    read::<kvm_debugregs>(0xa1),    // KVM_GET_DEBUGREGS
    write::<kvm_debugregs>(0xa2),   // KVM_SET_DEBUGREGS
    read::<kvm_xsave>(0xa4),        // KVM_GET_XSAVE
    write::<kvm_xsave>(0xa5),       // KVM_SET_XSAVE
    read::<kvm_xsave>(0xcf),        // KVM_GET_XSAVE2
    read::<kvm_xcrs>(0xa6),         // KVM_GET_XCRS
    write::<kvm_xcrs>(0xa7),        // KVM_SET_XCRS
    none(0xad),                     // KVM_KVMCLOCK_CTRL
    write::<kvm_device_attr>(0xe1), // KVM_SET_DEVICE_ATTR, of the TSC's offset: a vCPU has no other attributes that harm
    write::<kvm_device_attr>(0xe2), // KVM_GET_DEVICE_ATTR
];

/// A stream's O_NONBLOCK, as the standard library sets it.
pub(super) const FIONBIO: u64 = libc::FIONBIO;

/// A TAP's offloads, which a driver negotiates.
pub(super) const TUNSETOFFLOAD: u64 = libc::TUNSETOFFLOAD;
/// A TAP that is taken: its flags, and the length of its frames' header.
pub(super) const TAP: [u64; 2] = [libc::TUNGETIFF, libc::TUNSETVNETHDRSZ];

/// A disk's clone, in a live snapshot: `_IOW(0x94, 9, int)`, both descriptors held already.
pub(super) const FICLONE: u64 = ioctl_expr(_IOC_WRITE, 0x94, 9, 4);
/// Write protection of the own memory, in a live snapshot: `_IOWR(0xaa, 0, struct uffdio_register)`, `_IOR(0xaa, 1, struct uffdio_range)`.
pub(super) const UFFD: [u64; 2] = [ioctl_expr(_IOC_READ | _IOC_WRITE, 0xaa, 0, 32), ioctl_expr(_IOC_READ, 0xaa, 1, 16)];

/// Finds the pages that a guest has written: `_IOWR('f', 16, struct pm_scan_arg)`.
pub(super) const PAGEMAP_SCAN: u64 = ioctl_expr(_IOC_READ | _IOC_WRITE, b'f' as u32, 16, 96);

/// Maps pages that are in the page cache, for a VM that waits for them: `_IOWR(0xaa, 7, struct uffdio_continue)`.
pub(super) const UFFDIO_CONTINUE: u64 = ioctl_expr(_IOC_READ | _IOC_WRITE, 0xaa, 7, 32);
/// Lets whoever waited go on: `_IOR(0xaa, 2, struct uffdio_range)`.
pub(super) const UFFDIO_WAKE: u64 = ioctl_expr(_IOC_READ, 0xaa, 2, 16);
