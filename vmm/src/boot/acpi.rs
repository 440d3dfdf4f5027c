//! ACPI tables: how a distribution's kernel finds its vCPUs, its IOAPIC and its virtio devices, for which it has no command line.
//!
//! The hardware-reduced kind (ACPI 6.5, section 4.1): no PM timer, no legacy interrupt controllers, no fixed events. Kernels that are told
//! `acpi=off`, or were built without ACPI, take [`super::mptable`] and their command line.

use acpi_tables::{
    Aml,
    aml::{Device, EISAName, IO, Interrupt, Memory32Fixed, Name, Path, ResourceTemplate, Scope},
    fadt::{FADTBuilder, Flags},
    madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic},
    rsdp::Rsdp,
    sdt::Sdt,
    xsdt::XSDT,
};
use vm_memory::{Bytes, GuestAddress};

use super::Found;
use crate::{
    error::{Error, InGuest},
    layout,
    memory::GuestMemory,
};

const OEM: [u8; 6] = *b"STASIS";
const TABLE: [u8; 8] = *b"MICROVM ";
const REVISION: u32 = 1;
/// Bytes of a table's header; what lies behind it is its own.
const HEADER: u32 = 36;
const DSDT_REVISION: u8 = 6; // integers of 64 bits

/// Writes all tables; the address of the first of them, the RSDP.
pub(super) fn write(memory: &GuestMemory, vcpus: u8, devices: &[Found]) -> Result<u64, Error> {
    let mut next = layout::ACPI + Rsdp::len() as u64;
    let mut place = |bytes: &[u8]| {
        let at = next;
        next = (at + bytes.len() as u64).next_multiple_of(8);
        if next > layout::ACPI_END {
            return Err(Error::Refused("the ACPI tables of so many vCPUs and devices have no room"));
        }
        memory.write_slice(bytes, GuestAddress(at)).in_guest("an ACPI table")?;
        Ok(at)
    };
    let dsdt = place(dsdt(devices).as_slice())?;
    let fadt = FADTBuilder::new(OEM, TABLE, REVISION).dsdt_64(dsdt).flag(Flags::HwReducedAcpi).finalize();
    let tables = [place(&bytes_of(&fadt))?, place(&bytes_of(&madt(vcpus)))?];
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    tables.into_iter().for_each(|table| xsdt.add_entry(table));
    let rsdp = Rsdp::new(OEM, place(&bytes_of(&xsdt))?);
    memory.write_slice(&bytes_of(&rsdp), GuestAddress(layout::ACPI)).in_guest("the RSDP")?;
    Ok(layout::ACPI)
}

fn bytes_of(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn madt(vcpus: u8) -> MADT {
    let mut madt = MADT::new(OEM, TABLE, REVISION, LocalInterruptController::Address(layout::LAPIC));
    (0..vcpus).for_each(|id| madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled)));
    madt.add_structure(IoApic::new(vcpus + 1, layout::IOAPIC, 0));
    madt
}

/// The serial port, and every virtio device by the id that Linux's `virtio_mmio` driver knows.
fn dsdt(devices: &[Found]) -> Sdt {
    let ports = IO::new(layout::SERIAL_PORTS.start, layout::SERIAL_PORTS.start, 1, 8);
    let mut names = device("COM1", &EISAName::new("PNP0501"), 0, &ports, layout::SERIAL_IRQ);
    for (index, found) in (0u8..).zip(devices) {
        // The machine's memory and devices all lie below 4 GiB.
        let [base, size] = [found.registers, layout::MMIO_SIZE].map(|number| u32::try_from(number).unwrap_or(u32::MAX));
        let registers = Memory32Fixed::new(true, base, size);
        names.extend(device(&format!("V{index:03}"), &"LNRO0005", index, &registers, found.line));
    }
    let mut table = Sdt::new(*b"DSDT", HEADER, DSDT_REVISION, OEM, TABLE, REVISION);
    table.append_slice(&Scope::raw(Path::new("\\_SB_"), names));
    table
}

fn device(name: &str, id: &dyn Aml, unique: u8, registers: &dyn Aml, line: u32) -> Vec<u8> {
    // As the MP table has every line: on a rising edge, as ISA does.
    let interrupt = Interrupt::new(true, true, false, false, line);
    let (id, unique) = (Name::new(Path::new("_HID"), id), Name::new(Path::new("_UID"), &unique));
    let coherent = Name::new(Path::new("_CCA"), &1u8);
    let resources = ResourceTemplate::new(vec![registers, &interrupt]);
    let resources = Name::new(Path::new("_CRS"), &resources);
    bytes_of(&Device::new(Path::new(name), vec![&id, &unique, &coherent, &resources]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory;

    #[test]
    fn every_table_is_found_from_the_first_and_its_sum_is_zero() {
        let devices: Vec<_> = (0u32..8).map(|index| Found { registers: layout::MMIO_BASE, line: index }).collect();
        let (memory, _) = memory::fresh(8).unwrap();
        let at = write(&memory, layout::MAX_VCPUS, &devices).unwrap();
        let bytes = |at: u64, length: usize| {
            let mut bytes = vec![0; length];
            memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
            assert_eq!(bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0, "at {at:#x}");
            bytes
        };
        let table = |at: u64| bytes(at, memory.read_obj::<u32>(GuestAddress(at + 4)).unwrap() as usize);
        let address = |bytes: &[u8]| u64::from_le_bytes(*bytes.first_chunk().unwrap());
        let rsdp = bytes(at, 36);
        assert!(rsdp.starts_with(b"RSD PTR "));
        let xsdt = table(address(&rsdp[24..]));
        let named: Vec<_> = xsdt[36..].as_chunks::<8>().0.iter().map(|at| table(u64::from_le_bytes(*at))).collect();
        assert!(named[0].starts_with(b"FACP") && named[1].starts_with(b"APIC"));
        assert_eq!(named[1].len(), 44 + usize::from(layout::MAX_VCPUS) * 8 + 12);
        let dsdt = table(address(&named[0][140..]));
        assert!(dsdt.starts_with(b"DSDT"));
        assert_eq!(dsdt.windows(8).filter(|name| name == b"LNRO0005").count(), devices.len());
    }
}
