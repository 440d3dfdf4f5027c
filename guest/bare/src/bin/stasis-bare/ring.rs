//! One queue of a device: a split virtqueue (virtio 1.2, section 2.7) whose buffers lie beside it, and belong to one descriptor each.
//!
//! Nothing here waits for the device: what is sent is on its way, and the device is told only if it asks for that. Each telling is an exit of
//! the virtual machine, which costs more than all else that this guest does for a request.

use core::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence},
};

use virtio_drivers::transport::{Transport, mmio::MmioTransport};

/// Descriptors, and buffers.
pub(crate) const LENGTH: u16 = 64;
const SLOTS: usize = LENGTH as usize;
/// `VIRTQ_DESC_F_WRITE`: the device writes.
const DEVICE_WRITES: u16 = 2;

/// A queue's memory. All that device and guest share is atomic, but for the buffers.
#[repr(C, align(4096))]
pub(crate) struct Area<const SIZE: usize> {
    descriptors: [Descriptor; SLOTS],
    available: Available,
    used: Used,
    buffers: [UnsafeCell<[u8; SIZE]>; SLOTS],
}

// SAFETY: one processor, no interrupt handler of Rust's; of guest and device a buffer belongs to one at a time, as [`Ring`] counts.
unsafe impl<const SIZE: usize> Sync for Area<SIZE> {}

#[repr(C, align(16))]
struct Descriptor {
    address: AtomicU64,
    length: AtomicU32,
    flags: AtomicU16,
    next: AtomicU16,
}

#[repr(C)]
struct Available {
    flags: AtomicU16,
    index: AtomicU16,
    ring: [AtomicU16; SLOTS],
    /// The device interrupts when it has used one beyond this.
    used_event: AtomicU16,
}

#[repr(C, align(4))]
struct Used {
    flags: AtomicU16,
    index: AtomicU16,
    ring: [UsedSlot; SLOTS],
    /// It wants to be told of one beyond this.
    avail_event: AtomicU16,
}

#[repr(C)]
struct UsedSlot {
    id: AtomicU32,
    length: AtomicU32,
}

impl<const SIZE: usize> Area<SIZE> {
    pub(crate) const fn new() -> Self {
        Self {
            descriptors: [const {
                Descriptor {
                    address: AtomicU64::new(0),
                    length: AtomicU32::new(0),
                    flags: AtomicU16::new(0),
                    next: AtomicU16::new(0),
                }
            }; SLOTS],
            available: Available {
                flags: AtomicU16::new(0),
                index: AtomicU16::new(0),
                ring: [const { AtomicU16::new(0) }; SLOTS],
                used_event: AtomicU16::new(0),
            },
            used: Used {
                flags: AtomicU16::new(0),
                index: AtomicU16::new(0),
                ring: [const { UsedSlot { id: AtomicU32::new(0), length: AtomicU32::new(0) } }; SLOTS],
                avail_event: AtomicU16::new(0),
            },
            buffers: [const { UnsafeCell::new([0; SIZE]) }; SLOTS],
        }
    }
}

/// This guest's side of a queue.
pub(crate) struct Ring<const SIZE: usize> {
    area: &'static Area<SIZE>,
    queue: u16,
    /// Offered to the device so far, modulo 2¹⁶.
    offered: u16,
    /// Of these, the device has been told, or has seen by itself.
    told: u16,
    /// Taken back from it.
    taken: u16,
}

impl<const SIZE: usize> Ring<SIZE> {
    /// Makes `area` the memory of the device's `queue`, and of nothing else. All memory is mapped to itself.
    pub(crate) fn new(area: &'static Area<SIZE>, queue: u16, transport: &mut MmioTransport<'_>) -> Self {
        let address = |place: *const u8| place.expose_provenance() as u64;
        transport.queue_set(
            queue,
            LENGTH.into(),
            address((&raw const area.descriptors).cast()),
            address((&raw const area.available).cast()),
            address((&raw const area.used).cast()),
        );
        for (descriptor, buffer) in area.descriptors.iter().zip(&area.buffers) {
            descriptor.address.store(address(buffer.get().cast()), Ordering::Relaxed);
        }
        Self { area, queue, offered: 0, told: 0, taken: 0 }
    }

    /// Gives the device every buffer, to write into.
    pub(crate) fn offer_all(&mut self) {
        (0..LENGTH).for_each(|slot| self.offer_empty(slot));
    }

    /// Gives a buffer to the device, to write into. It is one that [`Self::take`] gave, or none was.
    fn offer_empty(&mut self, slot: u16) {
        let descriptor = &self.area.descriptors[usize::from(slot)];
        descriptor.length.store(u32::try_from(SIZE).unwrap_or_default(), Ordering::Relaxed);
        descriptor.flags.store(DEVICE_WRITES, Ordering::Relaxed);
        self.offer(slot);
    }

    /// The next buffer that the device has written, as `read` makes it out. It is the device's again after that.
    pub(crate) fn receive<T>(&mut self, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let (slot, length) = self.take()?;
        // SAFETY: the device has given it back, and gets it again only below.
        let buffer = unsafe { &*self.area.buffers[usize::from(slot)].get() };
        let made = read(&buffer[..length.min(SIZE)]);
        self.offer_empty(slot);
        Some(made)
    }

    /// Sends these bytes, at most `SIZE` of them. Where the device has all buffers, it is told and waited for.
    pub(crate) fn send(&mut self, parts: [&[u8]; 2], transport: &mut MmioTransport<'_>) {
        // Buffers are used in turn, and the device gives them back in turn.
        let slot = self.offered % LENGTH;
        while self.offered.wrapping_sub(self.taken) >= LENGTH {
            self.tell(transport);
            while self.take().is_some() {}
            core::hint::spin_loop();
        }
        // SAFETY: the device has given it back, if it ever had it.
        let buffer = unsafe { &mut *self.area.buffers[usize::from(slot)].get() };
        let mut length = 0;
        for part in parts {
            buffer[length..length + part.len()].copy_from_slice(part);
            length += part.len();
        }
        let descriptor = &self.area.descriptors[usize::from(slot)];
        descriptor.length.store(u32::try_from(length).unwrap_or_default(), Ordering::Relaxed);
        descriptor.flags.store(0, Ordering::Relaxed);
        self.offer(slot);
    }

    /// Tells the device of what it was offered since the last time, if it wants to be told.
    pub(crate) fn tell(&mut self, transport: &mut MmioTransport<'_>) {
        // Between the index, which the device reads after it has asked, and its question.
        fence(Ordering::SeqCst);
        let asked = self.area.used.avail_event.load(Ordering::Acquire);
        // `vring_need_event` (virtio 1.2, section 2.7.10): it asked for one of those that were not told of.
        let is_wanted = self.offered.wrapping_sub(asked).wrapping_sub(1) < self.offered.wrapping_sub(self.told);
        self.told = self.offered;
        if is_wanted {
            transport.notify(self.queue);
        }
    }

    /// Asks for an interrupt at the next buffer that comes back. False: one is here already.
    pub(crate) fn listen(&self) -> bool {
        self.area.available.used_event.store(self.taken, Ordering::Release);
        fence(Ordering::SeqCst);
        self.area.used.index.load(Ordering::Acquire) == self.taken
    }

    fn offer(&mut self, slot: u16) {
        self.area.available.ring[usize::from(self.offered % LENGTH)].store(slot, Ordering::Relaxed);
        self.offered = self.offered.wrapping_add(1);
        self.area.available.index.store(self.offered, Ordering::Release);
    }

    /// The next buffer that comes back, and how much the device has written.
    fn take(&mut self) -> Option<(u16, usize)> {
        if self.area.used.index.load(Ordering::Acquire) == self.taken {
            return None;
        }
        let used = &self.area.used.ring[usize::from(self.taken % LENGTH)];
        self.taken = self.taken.wrapping_add(1);
        let slot = u16::try_from(used.id.load(Ordering::Relaxed)).unwrap_or_default() % LENGTH;
        Some((slot, used.length.load(Ordering::Relaxed) as usize))
    }
}
