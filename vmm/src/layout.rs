//! Where things are in the guest's physical address space.
//!
//! Memory is one region from 0; it ends below the devices, so it may be at most [`MAX_MEMORY_MIB`].

/// First byte of the devices' pages.
pub(crate) const MMIO_BASE: u64 = 0xd000_0000;
/// Size of one device's registers.
pub(crate) const MMIO_SIZE: u64 = 0x1000;
/// Most guest memory, in MiB.
pub(crate) const MAX_MEMORY_MIB: u32 = 3072;

/// Most vCPUs: their MP table has to fit behind [`MP_TABLE`].
pub(crate) const MAX_VCPUS: u8 = 32;

/// Interrupt lines of the virtio devices, in order. Every one is free of legacy devices on both the PIC and the IOAPIC; the last two are
/// the IDE's, of which this machine has none.
pub(crate) const DEVICE_IRQS: [u32; 8] = [5, 6, 7, 9, 10, 11, 14, 15];
/// Interrupt line of the first serial port.
pub(crate) const SERIAL_IRQ: u32 = 4;
/// I/O ports of the first serial port.
pub(crate) const SERIAL_PORTS: std::ops::Range<u16> = 0x3f8..0x400;
/// The i8042's command port; a kernel with `reboot=k` resets the machine through it.
pub(crate) const I8042_COMMAND: u16 = 0x64;
/// The i8042 command that pulses the CPU's reset line.
pub(crate) const I8042_RESET: u8 = 0xfe;

/// Boot-time structures, all below the kernel.
pub(crate) const GDT: u64 = 0x500;
pub(crate) const IDT: u64 = 0x520;
pub(crate) const ZERO_PAGE: u64 = 0x7000;
pub(crate) const STACK: u64 = 0x8ff0;
pub(crate) const PML4: u64 = 0x9000;
pub(crate) const PDPTE: u64 = 0xa000;
pub(crate) const PDE: u64 = 0xb000;
pub(crate) const RNG_SEED: u64 = 0x1_f000;
pub(crate) const CMDLINE: u64 = 0x2_0000;
pub(crate) const CMDLINE_MAX: usize = 2048;
/// The last KiB of base memory: one of the places where a kernel looks for the MP table.
pub(crate) const MP_TABLE: u64 = 0x9_fc00;
/// End of the memory below the BIOS's and the video card's places.
pub(crate) const LOW_END: u64 = 0xa_0000;
/// ACPI's tables, in the BIOS's place.
pub(crate) const ACPI: u64 = 0xe_0000;
pub(crate) const ACPI_END: u64 = 0x10_0000;
/// Where the kernel is loaded.
pub(crate) const KERNEL: u64 = 0x10_0000;

/// KVM's own three pages and identity map (needed on Intel without unrestricted guest), out of the way of everything.
pub(crate) const TSS: usize = 0xfffb_d000;
/// The local APICs.
pub(crate) const LAPIC: u32 = 0xfee0_0000;
/// The IOAPIC.
pub(crate) const IOAPIC: u32 = 0xfec0_0000;
