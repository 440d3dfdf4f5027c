//! The MP table (Intel MultiProcessor Specification 1.4): how a kernel without ACPI finds its vCPUs and its IOAPIC.

use vm_memory::{Bytes, GuestAddress};

use crate::{
    error::{Error, InGuest},
    layout,
    memory::GuestMemory,
};

const SPEC_1_4: u8 = 4;
const APIC_VERSION: u8 = 0x14;
const CPU_ENABLED: u8 = 1;
const CPU_BOOT: u8 = 2;
const CPU_STEPPING: u32 = 0x600;
const CPU_FEATURES: u32 = 0x201; // FPU and APIC on chip
const INT: u8 = 0;
const NMI: u8 = 1;
const EXT_INT: u8 = 3;
const ISA_LINES: u8 = 16;

/// Writes the floating pointer and the table behind it.
pub(super) fn write(memory: &GuestMemory, vcpus: u8) -> Result<(), Error> {
    let table_at = layout::MP_TABLE + 16;
    let table = table(vcpus);
    let mut pointer = Vec::from(*b"_MP_");
    pointer.extend(u32::try_from(table_at).unwrap_or_default().to_le_bytes());
    pointer.extend([1, SPEC_1_4, 0, 0, 0, 0, 0, 0]);
    pointer[10] = complement(&pointer);
    memory.write_slice(&pointer, GuestAddress(layout::MP_TABLE)).in_guest("the MP table")?;
    memory.write_slice(&table, GuestAddress(table_at)).in_guest("the MP table")
}

fn table(vcpus: u8) -> Vec<u8> {
    let ioapic_id = vcpus + 1;
    let mut entries: Vec<u8> = Vec::new();
    let mut count: u16 = 0;
    let mut add = |entry: &[u8]| {
        entries.extend_from_slice(entry);
        count += 1;
    };
    for id in 0..vcpus {
        let flags = CPU_ENABLED | if id == 0 { CPU_BOOT } else { 0 };
        let mut cpu = vec![0, id, APIC_VERSION, flags];
        cpu.extend(CPU_STEPPING.to_le_bytes());
        cpu.extend(CPU_FEATURES.to_le_bytes());
        cpu.extend([0; 8]);
        add(&cpu);
    }
    add(&[&[1, 0][..], b"ISA   "].concat());
    add(&[&[2, ioapic_id, APIC_VERSION, 1][..], &layout::IOAPIC.to_le_bytes()].concat());
    for line in 0..ISA_LINES {
        add(&[3, INT, 0, 0, 0, line, ioapic_id, line]);
    }
    add(&[4, EXT_INT, 0, 0, 0, 0, 0, 0]);
    add(&[4, NMI, 0, 0, 0, 0, 0xff, 1]);

    let length = u16::try_from(44 + entries.len()).unwrap_or_default();
    let mut table = Vec::from(*b"PCMP");
    table.extend(length.to_le_bytes());
    table.extend([SPEC_1_4, 0]);
    table.extend(*b"STASIS  MICROVM     ");
    table.extend([0; 6]); // no OEM table
    table.extend(count.to_le_bytes());
    table.extend(layout::LAPIC.to_le_bytes());
    table.extend([0; 4]);
    table.extend(entries);
    table[7] = complement(&table);
    table
}

/// What makes the sum of all bytes zero.
fn complement(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)).wrapping_neg()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_zero_and_lengths_are_right() {
        for vcpus in [1, 2, 32] {
            let table = table(vcpus);
            assert_eq!(table.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
            assert_eq!(usize::from(u16::from_le_bytes([table[4], table[5]])), table.len());
            assert_eq!(table.len(), 44 + usize::from(vcpus) * 20 + 8 + 8 + 16 * 8 + 2 * 8);
            assert!(table.len() + 16 <= 1024, "fits the last KiB of base memory");
        }
    }
}
