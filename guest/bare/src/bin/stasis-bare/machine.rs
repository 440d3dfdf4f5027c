//! Memory, and the vsock device.

use core::{
    cell::UnsafeCell,
    ptr::{NonNull, with_exposed_provenance_mut},
};

use linked_list_allocator::Heap;
use virtio_drivers::transport::{DeviceType, Transport, mmio::MmioTransport};

/// Where the VMM puts its devices' registers, and their interrupt lines (`vmm/src/layout.rs`).
const REGISTERS: usize = 0xd000_0000;
const REGISTERS_SIZE: usize = 0x1000;
const LINES: [u32; 8] = [5, 6, 7, 9, 10, 11, 14, 15];

/// Templates of this guest have at least 64 MiB.
const HEAP_SIZE: usize = 40 << 20;

/// Memory that is handed out by address.
#[repr(align(4096))]
struct Room<const SIZE: usize>(UnsafeCell<[u8; SIZE]>);

// SAFETY: one processor, and no interrupt handler touches memory of Rust's.
unsafe impl<const SIZE: usize> Sync for Room<SIZE> {}

static HEAP_ROOM: Room<HEAP_SIZE> = Room(UnsafeCell::new([0; HEAP_SIZE]));

/// The heap of the only processor.
struct Allocator(UnsafeCell<Heap>);

// SAFETY: as for `Room`.
unsafe impl Sync for Allocator {}

#[global_allocator]
static ALLOCATOR: Allocator = Allocator(UnsafeCell::new(Heap::empty()));

// SAFETY: `Heap` hands out memory as the trait demands; nothing else runs while one of its methods does (one processor, no handlers of Rust's).
unsafe impl core::alloc::GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: core::alloc::Layout) -> *mut u8 {
        // SAFETY: nobody else has a reference: see above.
        let heap = unsafe { &mut *self.0.get() };
        heap.allocate_first_fit(layout).map_or(core::ptr::null_mut(), NonNull::as_ptr)
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: core::alloc::Layout) {
        // SAFETY: nobody else has a reference: see above.
        let heap = unsafe { &mut *self.0.get() };
        let Some(place) = NonNull::new(place) else { return };
        // SAFETY: the caller got it from `alloc` with this layout.
        unsafe { heap.deallocate(place, layout) }
    }
}

/// Before anything is allocated.
pub(crate) fn give_heap() {
    // SAFETY: called once, before any allocation: nobody else has a reference.
    let heap = unsafe { &mut *ALLOCATOR.0.get() };
    // SAFETY: the room is the heap's alone from now on.
    unsafe { heap.init(HEAP_ROOM.0.get().cast(), HEAP_SIZE) }
}

/// The vsock device's registers and its interrupt line.
pub(crate) fn find_vsock() -> Option<(MmioTransport<'static>, u32)> {
    LINES.into_iter().enumerate().find_map(|(at, line)| {
        let registers = NonNull::new(with_exposed_provenance_mut(REGISTERS + at * REGISTERS_SIZE))?;
        // SAFETY: a page of the devices' area, mapped by `entry`, which nothing else refers to. Where no device is, it reads as none.
        let transport = unsafe { MmioTransport::new(registers, REGISTERS_SIZE) }.ok()?;
        (transport.device_type() == DeviceType::Socket).then_some((transport, line))
    })
}
