//! A driver for tests: the guest's side of a transport, by its registers and its rings in guest memory.

use virtio_bindings::virtio_mmio as reg;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Device, QUEUE_SIZE, Transport};
use crate::memory::{self, GuestMemory};

/// Where a test may put buffers; rings are below.
pub(crate) const BUFFERS: u64 = 0x10_0000;
pub(crate) const MEMORY_MIB: u32 = 8;

const ACKNOWLEDGED_AND_DRIVER: u32 = 1 | 2;
pub(crate) const FEATURES_OK: u32 = 8;
pub(crate) const DRIVER_OK: u32 = 4;
pub(crate) const NEEDS_RESET: u32 = 64;
/// The feature words of a modern driver with event_idx.
pub(crate) const FEATURES: [u32; 2] = [1 << 29, 1];
const WRITE: u16 = 2;
const NEXT: u16 = 1;

pub(crate) struct Driver {
    pub(crate) transport: Transport,
    pub(crate) memory: GuestMemory,
    interrupt: EventFd,
    rings: Vec<Ring>,
}

#[derive(Clone, Copy, Default)]
struct Ring {
    next: u16,
    avail: u16,
    seen: u16,
}

/// A buffer of a chain: address, length, whether the device writes it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Buffer(pub(crate) u64, pub(crate) u32, pub(crate) bool);

/// A device that no other device's saved state fits.
pub(crate) fn other_device() -> Box<dyn Device> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(77 * 512).unwrap();
    Box::new(super::block::Block::new(file, false, None).unwrap())
}

/// Where the rings of a queue are.
pub(crate) fn ring_of(queue: usize) -> u64 {
    0x1_0000 * (queue as u64 + 1)
}

impl Driver {
    /// A device after power-on.
    pub(crate) fn cold(device: Box<dyn Device>) -> Self {
        Self::cold_over(device, memory::fresh(MEMORY_MIB).unwrap().0)
    }

    fn cold_over(device: Box<dyn Device>, memory: GuestMemory) -> Self {
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        let transport = Transport::new(device, memory.clone(), interrupt.try_clone().unwrap()).unwrap();
        let rings = vec![Ring::default(); transport.queue_count()];
        Self { transport, memory, interrupt, rings }
    }

    /// A device whose driver is ready.
    pub(crate) fn live(device: Box<dyn Device>) -> Self {
        Self::live_over(device, memory::fresh(MEMORY_MIB).unwrap().0)
    }

    /// A device whose driver is ready, over memory that is there already.
    pub(crate) fn live_over(device: Box<dyn Device>, memory: GuestMemory) -> Self {
        let mut driver = Self::cold_over(device, memory);
        driver.power_on();
        driver
    }

    /// What a driver does first, with rings that it has cleared.
    pub(crate) fn power_on(&mut self) {
        self.power_on_with(FEATURES);
    }

    /// The same, with features of its own.
    pub(crate) fn power_on_with(&mut self, features: [u32; 2]) {
        self.negotiate(features);
        for queue in 0..self.rings.len() {
            self.rings[queue] = Ring::default();
            self.memory.write_slice(&[0; 0x3000], GuestAddress(ring_of(queue))).unwrap();
            self.set_up(queue, ring_of(queue));
        }
        self.set(reg::VIRTIO_MMIO_STATUS, ACKNOWLEDGED_AND_DRIVER | FEATURES_OK | DRIVER_OK);
        assert_eq!(self.get(reg::VIRTIO_MMIO_STATUS), 15);
    }

    /// The same guest after a restore, on a fresh device.
    pub(crate) fn restored(&self, device: Box<dyn Device>) -> Result<Self, crate::Error> {
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        let mut transport = Transport::new(device, self.memory.clone(), interrupt.try_clone().unwrap())?;
        transport.restore(&self.transport.save()?)?;
        Ok(Self { transport, memory: self.memory.clone(), interrupt, rings: self.rings.clone() })
    }

    pub(crate) fn negotiate(&mut self, features: [u32; 2]) {
        self.set(reg::VIRTIO_MMIO_STATUS, ACKNOWLEDGED_AND_DRIVER);
        for (select, word) in (0..).zip(features) {
            self.set(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            self.set(reg::VIRTIO_MMIO_DRIVER_FEATURES, word);
        }
        self.set(reg::VIRTIO_MMIO_STATUS, ACKNOWLEDGED_AND_DRIVER | FEATURES_OK);
    }

    pub(crate) fn set_up(&mut self, queue: usize, at: u64) {
        self.set(reg::VIRTIO_MMIO_QUEUE_SEL, u32::try_from(queue).unwrap());
        self.set(reg::VIRTIO_MMIO_QUEUE_NUM, u32::from(QUEUE_SIZE));
        let [low, high] = [at & 0xffff_ffff, at >> 32].map(|half| u32::try_from(half).unwrap());
        self.set(reg::VIRTIO_MMIO_QUEUE_DESC_LOW, low);
        self.set(reg::VIRTIO_MMIO_QUEUE_DESC_HIGH, high);
        self.set(reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, low.wrapping_add(0x1000));
        self.set(reg::VIRTIO_MMIO_QUEUE_AVAIL_HIGH, high);
        self.set(reg::VIRTIO_MMIO_QUEUE_USED_LOW, low.wrapping_add(0x2000));
        self.set(reg::VIRTIO_MMIO_QUEUE_USED_HIGH, high);
        self.set(reg::VIRTIO_MMIO_QUEUE_READY, 1);
    }

    pub(crate) fn set(&mut self, register: u32, value: u32) {
        self.transport.write(register.into(), &value.to_le_bytes());
    }

    pub(crate) fn get(&self, register: u32) -> u32 {
        let mut word = [0; 4];
        self.transport.read(register.into(), &mut word);
        u32::from_le_bytes(word)
    }

    /// Puts a chain into a queue, without telling the device. Returns its head.
    pub(crate) fn add(&mut self, queue: usize, chain: &[Buffer]) -> u16 {
        let head = self.rings[queue].next;
        for (position, Buffer(address, length, write)) in chain.iter().enumerate() {
            let index = self.rings[queue].next;
            let next = (index + 1) % QUEUE_SIZE;
            let more = position + 1 < chain.len();
            let flags = if *write { WRITE } else { 0 } | if more { NEXT } else { 0 };
            self.put_descriptor(queue, index, *address, *length, flags, next);
            self.rings[queue].next = next;
        }
        self.offer(queue, head);
        head
    }

    pub(crate) fn put_descriptor(&self, queue: usize, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let at = ring_of(queue) + u64::from(index) * 16;
        let put = |offset, bytes: &[u8]| self.memory.write_slice(bytes, GuestAddress(at + offset)).unwrap();
        put(0, &address.to_le_bytes());
        put(8, &length.to_le_bytes());
        put(12, &flags.to_le_bytes());
        put(14, &next.to_le_bytes());
    }

    /// Puts a descriptor's index into the available ring.
    pub(crate) fn offer(&mut self, queue: usize, head: u16) {
        let avail = self.rings[queue].avail;
        let slot = ring_of(queue) + 0x1004 + u64::from(avail % QUEUE_SIZE) * 2;
        self.memory.write_slice(&head.to_le_bytes(), GuestAddress(slot)).unwrap();
        self.set_avail_index(queue, avail.wrapping_add(1));
    }

    pub(crate) fn set_avail_index(&mut self, queue: usize, index: u16) {
        self.rings[queue].avail = index;
        self.memory.write_slice(&index.to_le_bytes(), GuestAddress(ring_of(queue) + 0x1002)).unwrap();
    }

    /// One turn of the device. Returns whether it wants another.
    pub(crate) fn turn(&mut self, queue: usize) -> bool {
        self.transport.notified(queue).unwrap()
    }

    /// A source of the device's own is ready. Returns whether it wants another turn.
    pub(crate) fn source(&mut self, number: u8) -> bool {
        self.transport.source_ready(number).unwrap()
    }

    /// Turns until the device wants no more.
    pub(crate) fn kick(&mut self, queue: usize) {
        while self.turn(queue) {}
    }

    /// Heads and lengths that the device has used since the last call.
    pub(crate) fn used(&mut self, queue: usize) -> Vec<(u16, u32)> {
        let base = ring_of(queue) + 0x2000;
        let index: u16 = self.memory.read_obj(GuestAddress(base + 2)).unwrap();
        let mut used = Vec::new();
        while self.rings[queue].seen != index {
            let slot = base + 4 + u64::from(self.rings[queue].seen % QUEUE_SIZE) * 8;
            let head: u32 = self.memory.read_obj(GuestAddress(slot)).unwrap();
            used.push((u16::try_from(head).unwrap(), self.memory.read_obj(GuestAddress(slot + 4)).unwrap()));
            self.rings[queue].seen = self.rings[queue].seen.wrapping_add(1);
        }
        // Tell of the next one (used_event).
        let seen = self.rings[queue].seen;
        self.memory.write_slice(&seen.to_le_bytes(), GuestAddress(ring_of(queue) + 0x1004 + 512)).unwrap();
        used
    }

    /// Whether a notification of the chain that was added last is asked for (avail_event).
    pub(crate) fn must_notify(&self, queue: usize) -> bool {
        let asked: u16 = self.memory.read_obj(GuestAddress(ring_of(queue) + 0x2004 + 2048)).unwrap();
        asked == self.rings[queue].avail.wrapping_sub(1)
    }

    /// Whether the interrupt was raised since the last call.
    pub(crate) fn interrupted(&self) -> bool {
        self.interrupt.read().is_ok()
    }
}
