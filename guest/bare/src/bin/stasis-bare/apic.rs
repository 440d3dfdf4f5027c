//! The local APIC and the IOAPIC: one device's interrupts, and a timer.

use core::ptr::{read_volatile, with_exposed_provenance, with_exposed_provenance_mut, write_volatile};

use crate::{
    entry::{DEVICE_VECTOR, TIMER_VECTOR},
    ports,
};

const LOCAL: usize = 0xfee0_0000;
const SPURIOUS: usize = 0xf0;
const LINT0: usize = 0x350;
const TIMER: usize = 0x320;
const TIMER_DIVIDE: usize = 0x3e0;
const TIMER_INITIAL: usize = 0x380;
const TIMER_CURRENT: usize = 0x390;
const MASKED: u32 = 1 << 16;
/// Software enable, and the vector of spurious interrupts, which never come while all are let in at `hlt`.
const ENABLED: u32 = 0x1ff;
const DIVIDE_BY_1: u32 = 0b1011;

const IOAPIC: usize = 0xfec0_0000;
const IOAPIC_DATA: usize = 0x10;
/// The first line's redirection; each has two registers.
const REDIRECTION: u32 = 0x10;

/// Interrupts of `line`, and the timer's, come to this processor. Nothing else's do.
pub(crate) fn enable(line: u32) {
    ports::mask_legacy_interrupts();
    write(LOCAL + LINT0, MASKED);
    write(LOCAL + SPURIOUS, ENABLED);
    write(LOCAL + TIMER_DIVIDE, DIVIDE_BY_1);
    write(LOCAL + TIMER, TIMER_VECTOR.into());
    // Rising edge, to processor 0.
    for (register, value) in [(1, 0), (0, u32::from(DEVICE_VECTOR))] {
        write(IOAPIC, REDIRECTION + 2 * line + register);
        write(IOAPIC + IOAPIC_DATA, value);
    }
}

/// One interrupt in so many nanoseconds (KVM's APIC timer counts at 1 GHz); 0 calls it off.
pub(crate) fn ring_in(nanoseconds: u32) {
    write(LOCAL + TIMER_INITIAL, nanoseconds);
}

/// What is left of them.
pub(crate) fn left() -> u32 {
    // SAFETY: a register of the local APIC, mapped by `entry`.
    unsafe { read_volatile(with_exposed_provenance(LOCAL + TIMER_CURRENT)) }
}

fn write(register: usize, value: u32) {
    // SAFETY: a register of the local APIC or the IOAPIC, mapped by `entry`, which no Rust object overlaps.
    unsafe { write_volatile(with_exposed_provenance_mut(register), value) }
}
