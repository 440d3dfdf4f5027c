//! The mmio transport of virtio 1.2 (section 4.2, "Virtio Over MMIO"), version 2, without legacy interface.

use std::{fmt::Display, num::Wrapping, sync::atomic::Ordering};

use serde::{Deserialize, Serialize};
use virtio_bindings::{
    virtio_config::{
        VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
        VIRTIO_F_VERSION_1,
    },
    virtio_mmio as reg,
    virtio_ring::VIRTIO_RING_F_EVENT_IDX,
};
use virtio_queue::{Queue, QueueState, QueueT};
use vmm_sys_util::eventfd::EventFd;

use super::{Device, DeviceState, Io, Outcome, QUEUE_SIZE};
use crate::{
    error::{Error, Host},
    memory::GuestMemory,
};

/// "virt", little endian.
const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
/// Ours to choose: "STAS".
const VENDOR: u32 = 0x5341_5453;
const INTERRUPT_USED: u32 = 1;
const INTERRUPT_CONFIG: u32 = 2;

/// A device behind its registers.
pub(crate) struct Transport {
    device: Box<dyn Device>,
    memory: GuestMemory,
    queues: Vec<Queue>,
    interrupt: EventFd,
    registers: Registers,
    has_complained: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Registers {
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: u32,
    interrupt_status: u32,
    status: u32,
    /// Raised with every change of the configuration by the device.
    config_generation: u32,
}

/// A transport and its device, as a snapshot keeps them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TransportState {
    registers: Registers,
    queues: Vec<SavedQueue>,
    device: DeviceState,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct SavedQueue {
    max_size: u16,
    next_avail: u16,
    next_used: u16,
    event_idx_enabled: bool,
    size: u16,
    ready: bool,
    desc_table: u64,
    avail_ring: u64,
    used_ring: u64,
}

impl TransportState {
    /// It had connections that are not in it.
    pub(crate) fn is_cut(&self) -> bool {
        self.device == DeviceState::VsockCut
    }
}

impl Transport {
    /// A device after power-on.
    pub(crate) fn new(device: Box<dyn Device>, memory: GuestMemory, interrupt: EventFd) -> Result<Self, Error> {
        let queue = || {
            Queue::new(QUEUE_SIZE)
                .map_err(|error| Error::Host { what: "virtqueue", source: std::io::Error::other(error.to_string()) })
        };
        let queues = (0..device.queues()).map(|_| queue()).collect::<Result<_, _>>()?;
        Ok(Self { device, memory, queues, interrupt, registers: Registers::default(), has_complained: false })
    }

    /// Puts a saved state into the device, fresh or used. Of what it has been doing, nothing stays.
    pub(crate) fn restore(&mut self, state: &TransportState) -> Result<(), Error> {
        self.device.reset();
        self.has_complained = false;
        let refuse = |reason: String| Err(Error::Snapshot(reason));
        self.device.restore(&state.device)?;
        if state.queues.len() != self.queues.len() {
            return refuse(format!("a device has {} queues, the snapshot {}", self.queues.len(), state.queues.len()));
        }
        let queues = state.queues.iter().map(|saved| Queue::try_from(QueueState::from(*saved)));
        self.queues =
            queues.collect::<Result<_, _>>().map_err(|error| Error::Snapshot(format!("virtqueue: {error}")))?;
        self.registers = state.registers.clone();
        if self.registers.driver_features & !self.offered() != 0 {
            return refuse("the driver uses features that the device does not offer".into());
        }
        if self.queues.iter().any(|queue| queue.max_size() != QUEUE_SIZE || !self.is_consistent(queue)) {
            return refuse("a virtqueue does not fit guest memory".into());
        }
        if self.is_live() {
            self.device.started(self.registers.driver_features)?;
        }
        // What KVM had not yet taken from the eventfd when the snapshot was made is in no other saved state. A guest that has seen
        // the interrupt already finds nothing new.
        if self.registers.interrupt_status != 0 {
            self.interrupt.write(1).host("write to an interrupt's eventfd")?;
        }
        Ok(())
    }

    /// A queue that is in use lies in guest memory, and its indices agree with the rings there.
    fn is_consistent(&self, queue: &Queue) -> bool {
        if !queue.ready() {
            return true;
        }
        if !queue.is_valid(&self.memory) {
            return false;
        }
        let memory = &self.memory;
        let (Ok(avail), Ok(used)) =
            (queue.avail_idx(memory, Ordering::Acquire), queue.used_idx(memory, Ordering::Acquire))
        else {
            return false;
        };
        let waiting = avail - Wrapping(queue.next_avail());
        !self.is_live() || waiting.0 <= queue.size() && used.0 == queue.next_used()
    }

    /// What a snapshot keeps.
    pub(crate) fn save(&self) -> Result<TransportState, Error> {
        Ok(self.with(self.device.save()?))
    }

    /// What a snapshot keeps that may end the device's connections.
    pub(crate) fn save_cut(&self) -> Result<TransportState, Error> {
        Ok(self.with(self.device.save_cut()?))
    }

    fn with(&self, device: DeviceState) -> TransportState {
        TransportState {
            registers: self.registers.clone(),
            queues: self.queues.iter().map(|queue| SavedQueue::from(queue.state())).collect(),
            device,
        }
    }

    /// Number of queues, each with a notification register of its own.
    pub(crate) fn queue_count(&self) -> usize {
        self.queues.len()
    }

    /// Handles a notification of a queue. Returns whether there is more to do, as [`Outcome::more`] says.
    pub(crate) fn notified(&mut self, queue: usize) -> Result<bool, Error> {
        self.drive(|device, io| device.notified(queue, io))
    }

    /// A source of the device's own is ready. Returns as [`Transport::notified`] does.
    pub(crate) fn source_ready(&mut self, number: u8) -> Result<bool, Error> {
        if !self.is_live() {
            self.device.quiet();
        }
        self.drive(|device, io| device.source_ready(number, io))
    }

    /// The device waits for none of its sources until it is woken.
    pub(crate) fn quiet(&mut self) {
        self.device.quiet();
    }

    /// The guest runs again. Returns as [`Transport::notified`] does.
    pub(crate) fn wake(&mut self) -> Result<bool, Error> {
        self.drive(|device, io| device.wake(io))
    }

    /// Lets the device do something with its queues, and tells the guest.
    ///
    /// A guest that breaks the rules of its own queues loses the device until it resets it: nothing else suffers.
    pub(crate) fn drive(
        &mut self,
        work: impl FnOnce(&mut dyn Device, &mut Io<'_>) -> Result<Outcome, virtio_queue::Error>,
    ) -> Result<bool, Error> {
        if !self.is_live() {
            return Ok(false);
        }
        let mut io = Io { memory: &self.memory, queues: &mut self.queues };
        match work(self.device.as_mut(), &mut io) {
            Ok(Outcome { used, more }) => {
                if used {
                    self.signal(INTERRUPT_USED)?;
                }
                Ok(more)
            }
            Err(error) => self.break_down(&error).map(|()| false),
        }
    }

    /// Changes the device's configuration, and tells a driver that is there.
    pub(crate) fn configure(&mut self, change: impl FnOnce(&mut dyn Device) -> Result<(), Error>) -> Result<(), Error> {
        change(self.device.as_mut())?;
        self.registers.config_generation = self.registers.config_generation.wrapping_add(1);
        if self.is_live() { self.signal(INTERRUPT_CONFIG) } else { Ok(()) }
    }

    /// The guest broke the rules of a queue: the device stops until it is reset.
    fn break_down(&mut self, error: &dyn Display) -> Result<(), Error> {
        // Once: a guest that does this over and over must not fill the host's log.
        if !std::mem::replace(&mut self.has_complained, true) {
            tracing::warn!(device = self.device.id(), %error, "a virtqueue is broken; the device stops until it is reset");
        }
        self.device.quiet();
        self.registers.status |= VIRTIO_CONFIG_S_NEEDS_RESET;
        self.signal(INTERRUPT_CONFIG)
    }

    /// The device itself.
    pub(crate) fn device(&mut self) -> &mut dyn Device {
        self.device.as_mut()
    }

    fn is_live(&self) -> bool {
        let dead = VIRTIO_CONFIG_S_NEEDS_RESET | VIRTIO_CONFIG_S_FAILED;
        self.registers.status & VIRTIO_CONFIG_S_DRIVER_OK != 0 && self.registers.status & dead == 0
    }

    fn signal(&mut self, why: u32) -> Result<(), Error> {
        self.registers.interrupt_status |= why;
        self.interrupt.write(1).host("write to an interrupt's eventfd")
    }

    /// The driver reads registers or configuration.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        if let Some(at) = offset.checked_sub(u64::from(reg::VIRTIO_MMIO_CONFIG)) {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            let config = self.device.config().get(at..).unwrap_or_default();
            let length = config.len().min(data.len());
            data[..length].copy_from_slice(&config[..length]);
        } else if let Ok(word) = <&mut [u8; 4]>::try_from(data) {
            *word = self.register(u32::try_from(offset).unwrap_or(u32::MAX)).to_le_bytes();
        }
    }

    fn register(&self, offset: u32) -> u32 {
        let half = |value: u64, selector: u32| match selector {
            0 => u32::try_from(value & 0xffff_ffff).unwrap_or_default(),
            1 => u32::try_from(value >> 32).unwrap_or_default(),
            _ => 0,
        };
        match offset {
            reg::VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            reg::VIRTIO_MMIO_VERSION => VERSION,
            reg::VIRTIO_MMIO_DEVICE_ID => self.device.id(),
            reg::VIRTIO_MMIO_VENDOR_ID => VENDOR,
            reg::VIRTIO_MMIO_DEVICE_FEATURES => half(self.offered(), self.registers.device_features_sel),
            reg::VIRTIO_MMIO_QUEUE_NUM_MAX => self.selected().map_or(0, |queue| u32::from(queue.max_size())),
            reg::VIRTIO_MMIO_QUEUE_READY => self.selected().map_or(0, |queue| u32::from(queue.ready())),
            reg::VIRTIO_MMIO_INTERRUPT_STATUS => self.registers.interrupt_status,
            reg::VIRTIO_MMIO_STATUS => self.registers.status,
            reg::VIRTIO_MMIO_CONFIG_GENERATION => self.registers.config_generation,
            // No region of shared memory exists.
            reg::VIRTIO_MMIO_SHM_LEN_LOW..=reg::VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            _ => 0,
        }
    }

    /// The driver writes a register or configuration.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(at) = offset.checked_sub(u64::from(reg::VIRTIO_MMIO_CONFIG)) {
            return self.device.write_config(usize::try_from(at).unwrap_or(usize::MAX), data);
        }
        let (Ok(offset), Ok(word)) = (u32::try_from(offset), <[u8; 4]>::try_from(data)) else { return };
        let value = u32::from_le_bytes(word);
        let registers = &mut self.registers;
        match offset {
            reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL => registers.device_features_sel = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL => registers.driver_features_sel = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES => {
                let shift = if registers.driver_features_sel == 0 { 0 } else { 32 };
                if registers.status & VIRTIO_CONFIG_S_FEATURES_OK == 0 && registers.driver_features_sel < 2 {
                    registers.driver_features &= !(0xffff_ffff << shift);
                    registers.driver_features |= u64::from(value) << shift;
                }
            }
            reg::VIRTIO_MMIO_QUEUE_SEL => registers.queue_sel = value,
            reg::VIRTIO_MMIO_INTERRUPT_ACK => registers.interrupt_status &= !value,
            reg::VIRTIO_MMIO_STATUS => self.set_status(value),
            _ => self.configure_queue(offset, value),
        }
    }

    fn configure_queue(&mut self, offset: u32, value: u32) {
        let frozen = self.registers.status & VIRTIO_CONFIG_S_DRIVER_OK != 0;
        let selected = usize::try_from(self.registers.queue_sel).unwrap_or(usize::MAX);
        let Some(queue) = self.queues.get_mut(selected).filter(|_| !frozen) else { return };
        match offset {
            reg::VIRTIO_MMIO_QUEUE_NUM => queue.set_size(u16::try_from(value).unwrap_or(0)),
            reg::VIRTIO_MMIO_QUEUE_READY => queue.set_ready(value == 1),
            reg::VIRTIO_MMIO_QUEUE_DESC_LOW => queue.set_desc_table_address(Some(value), None),
            reg::VIRTIO_MMIO_QUEUE_DESC_HIGH => queue.set_desc_table_address(None, Some(value)),
            reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW => queue.set_avail_ring_address(Some(value), None),
            reg::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => queue.set_avail_ring_address(None, Some(value)),
            reg::VIRTIO_MMIO_QUEUE_USED_LOW => queue.set_used_ring_address(Some(value), None),
            reg::VIRTIO_MMIO_QUEUE_USED_HIGH => queue.set_used_ring_address(None, Some(value)),
            _ => {}
        }
    }

    fn set_status(&mut self, value: u32) {
        if value == 0 {
            self.device.reset();
            self.queues.iter_mut().for_each(Queue::reset);
            self.registers = Registers::default();
            return;
        }
        // The driver adds bits one by one and takes none back but by a reset; one bit is ours alone (section 2.1).
        let mut added = value & !VIRTIO_CONFIG_S_NEEDS_RESET & !self.registers.status;
        let unknown = self.registers.driver_features & !self.offered() != 0;
        let modern = self.registers.driver_features & (1 << VIRTIO_F_VERSION_1) != 0;
        if unknown || !modern {
            added &= !VIRTIO_CONFIG_S_FEATURES_OK;
        }
        if (self.registers.status | added) & VIRTIO_CONFIG_S_FEATURES_OK == 0 {
            added &= !VIRTIO_CONFIG_S_DRIVER_OK;
        }
        self.registers.status |= added;
        if added & VIRTIO_CONFIG_S_DRIVER_OK != 0 {
            self.start();
        }
    }

    /// The driver has set up its queues, which are frozen from here on.
    fn start(&mut self) {
        let event_idx = self.registers.driver_features & (1 << VIRTIO_RING_F_EVENT_IDX) != 0;
        self.queues.iter_mut().for_each(|queue| queue.set_event_idx(event_idx));
        let broken = if self.queues.iter().any(|queue| queue.ready() && !queue.is_valid(&self.memory)) {
            self.break_down(&"it lies outside guest memory")
        } else if let Err(error) = self.device.started(self.registers.driver_features) {
            self.break_down(&error.chain())
        } else {
            Ok(())
        };
        if let Err(error) = broken {
            tracing::error!(%error, "an interrupt is lost");
        }
    }

    fn offered(&self) -> u64 {
        self.device.features() | 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn selected(&self) -> Option<&Queue> {
        self.queues.get(usize::try_from(self.registers.queue_sel).ok()?)
    }
}

impl From<QueueState> for SavedQueue {
    fn from(state: QueueState) -> Self {
        let QueueState {
            max_size,
            next_avail,
            next_used,
            event_idx_enabled,
            size,
            ready,
            desc_table,
            avail_ring,
            used_ring,
        } = state;
        Self { max_size, next_avail, next_used, event_idx_enabled, size, ready, desc_table, avail_ring, used_ring }
    }
}

impl From<SavedQueue> for QueueState {
    fn from(saved: SavedQueue) -> Self {
        let SavedQueue {
            max_size,
            next_avail,
            next_used,
            event_idx_enabled,
            size,
            ready,
            desc_table,
            avail_ring,
            used_ring,
        } = saved;
        Self { max_size, next_avail, next_used, event_idx_enabled, size, ready, desc_table, avail_ring, used_ring }
    }
}

#[cfg(test)]
mod tests;
