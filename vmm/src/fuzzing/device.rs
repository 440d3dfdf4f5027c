//! A device under a driver that does anything.

use std::{io, os::fd::BorrowedFd, os::unix::net::UnixStream, sync::Arc};

use virtio_bindings::virtio_mmio as reg;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{
    error::Error,
    memory::{self, GuestMemory, Room, discard::Discard},
    virtio::{Device, Events, Outcome, Transport, Watch, balloon::Balloon, block::Block, rng::Entropy, vsock::Vsock},
};

const MEMORY_MIB: u32 = 4;
/// Rings of queue n; descriptors first, then the available ring, then the used one, a page each.
const RINGS: u64 = 0x1_0000;
const RING: u64 = 0x3000;
const BUFFERS: u64 = 0x10_0000;
const DISK_BYTES: u64 = 64 * 512;
/// Turns that one notification may lead to: a device that always wants another is the event loop's concern, not a hang.
const TURNS: u32 = 8;
/// Steps of one input at most, so that a long input does not pass for a hang.
const STEPS: usize = 256;

/// Nobody watches: the fuzzer says itself when a source is ready.
struct Unwatched;

impl Watch for Unwatched {
    fn watch(&self, _fd: BorrowedFd<'_>, _key: u64, _events: Events) -> io::Result<()> {
        Ok(())
    }
}

/// Bytes, taken one after the other; zeros when there are no more.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => 0,
        }
    }

    fn short(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }
}

struct Bench {
    transport: Transport,
    memory: GuestMemory,
    queues: u8,
    kind: u8,
    disk: std::fs::File,
    /// The node's ends of connections.
    streams: Vec<UnixStream>,
}

/// The first byte chooses the device, the rest what its driver does.
pub fn device(bytes: &[u8]) {
    let mut input = Input(bytes);
    let kind = input.byte();
    // Only what the host lacks fails here.
    let Ok(room) = Room::reserve(MEMORY_MIB) else { return };
    if let Ok(mut bench) = Bench::new(kind, &room) {
        bench.power_on();
        for _ in 0..STEPS {
            if input.0.is_empty() {
                break;
            }
            bench.step(&mut input);
        }
    }
}

impl Bench {
    fn new(kind: u8, room: &Room) -> Result<Self, Error> {
        let memory = room.map_shared(&memory::fresh_file(MEMORY_MIB)?)?;
        let disk = memory::fresh_file(1)?;
        disk.set_len(DISK_BYTES).map_err(|source| Error::Host { what: "ftruncate", source })?;
        let transport = transport(kind, &memory, &disk)?;
        let queues = u8::try_from(transport.queue_count()).unwrap_or(u8::MAX);
        Ok(Self { transport, memory, queues, kind, disk, streams: Vec::new() })
    }

    fn set(&mut self, register: u32, value: u32) {
        self.transport.write(register.into(), &value.to_le_bytes());
    }

    /// What a driver does first: a fuzzer would be long in finding it.
    fn power_on(&mut self) {
        self.set(reg::VIRTIO_MMIO_STATUS, 3);
        for (select, word) in [(0, 1 << 29), (1, 1)] {
            self.set(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            self.set(reg::VIRTIO_MMIO_DRIVER_FEATURES, word);
        }
        self.set(reg::VIRTIO_MMIO_STATUS, 3 | 8);
        for queue in 0..self.queues {
            self.set_up(queue);
        }
        self.set(reg::VIRTIO_MMIO_STATUS, 3 | 8 | 4);
    }

    fn set_up(&mut self, queue: u8) {
        let rings = u32::try_from(rings_of(queue)).unwrap_or_default();
        self.set(reg::VIRTIO_MMIO_QUEUE_SEL, queue.into());
        self.set(reg::VIRTIO_MMIO_QUEUE_NUM, 16);
        self.set(reg::VIRTIO_MMIO_QUEUE_DESC_LOW, rings);
        self.set(reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, rings + 0x1000);
        self.set(reg::VIRTIO_MMIO_QUEUE_USED_LOW, rings + 0x2000);
        self.set(reg::VIRTIO_MMIO_QUEUE_READY, 1);
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() % 12 {
            0 => {
                let (register, value) = (input.short() % 0x110, input.word());
                self.set(register.into(), value);
            }
            1 => {
                let mut seen = [0; 4];
                self.transport.read(u64::from(input.short() % 0x110), &mut seen);
            }
            2 => self.poke(u64::from(input.word() % (MEMORY_MIB << 20)), input.word()),
            3 => self.poke(BUFFERS + u64::from(input.short()), input.word()),
            4 | 5 => self.chain(input),
            6 => self.notify(input.byte()),
            7 => drop(self.transport.source_ready(input.byte() % 4)),
            8 => {
                self.transport.quiet();
                drop(self.transport.wake());
            }
            9 => self.restore_saved(),
            10 => self.connect(input.byte()),
            _ => {
                self.set(reg::VIRTIO_MMIO_STATUS, 0);
                self.power_on();
            }
        }
    }

    fn poke(&self, at: u64, word: u32) {
        // Beyond the end it is refused.
        let _ = self.memory.write_obj(word, GuestAddress(at));
    }

    /// Puts a chain into a queue and tells of it: descriptors as they come, most of them in guest memory.
    fn chain(&mut self, input: &mut Input<'_>) {
        let queue = input.byte() % self.queues.max(1);
        let rings = rings_of(queue);
        let count = u16::from(input.byte() % 4) + 1;
        for index in 0..count {
            let address = match input.byte() {
                255 => u64::from(input.word()) << 8,
                _ => BUFFERS + u64::from(input.short()),
            };
            let (length, flags) = (u32::from(input.short()), u16::from(input.byte() & 7));
            let next = if input.byte() == 255 { input.short() } else { index + 1 };
            let flags = if index + 1 < count { flags | 1 } else { flags };
            let at = rings + u64::from(index) * 16;
            let _ = self.memory.write_obj(address, GuestAddress(at));
            let _ = self.memory.write_obj(length, GuestAddress(at + 8));
            let _ = self.memory.write_obj(flags, GuestAddress(at + 12));
            let _ = self.memory.write_obj(next, GuestAddress(at + 14));
        }
        let index: u16 = self.memory.read_obj(GuestAddress(rings + 0x1002)).unwrap_or_default();
        let _ = self.memory.write_obj(0_u16, GuestAddress(rings + 0x1004 + u64::from(index % 16) * 2));
        let _ = self.memory.write_obj(index.wrapping_add(1), GuestAddress(rings + 0x1002));
        self.notify(queue);
    }

    fn notify(&mut self, queue: u8) {
        let queue = usize::from(queue % self.queues.max(1));
        for _ in 0..TURNS {
            if !matches!(self.transport.notified(queue), Ok(true)) {
                break;
            }
        }
    }

    /// A snapshot and a restore of it; a state that a guest has made unusable is refused.
    fn restore_saved(&mut self) {
        let Ok(saved) = self.transport.save() else { return };
        let Ok(mut other) = transport(self.kind, &self.memory, &self.disk) else { return };
        if other.restore(&saved).is_ok() {
            self.transport = other;
            drop(self.transport.wake());
        }
    }

    /// The node connects to a port of the guest.
    fn connect(&mut self, port: u8) {
        let Ok((ours, theirs)) = UnixStream::pair() else { return };
        let nonblocking = ours.set_nonblocking(true).and(theirs.set_nonblocking(true));
        let connected = self.transport.drive(|device, io| match device.as_vsock() {
            Some(vsock) => vsock.connect(theirs, port.into(), io),
            None => Ok(Outcome::default()),
        });
        if nonblocking.is_ok() && connected.is_ok() && self.streams.len() < 8 {
            self.streams.push(ours);
        }
    }
}

fn rings_of(queue: u8) -> u64 {
    RINGS + RING * u64::from(queue)
}

fn transport(kind: u8, memory: &GuestMemory, disk: &std::fs::File) -> Result<Transport, Error> {
    let disk = || disk.try_clone().map_err(|source| Error::Host { what: "dup", source });
    let device: Box<dyn Device> = match kind % 5 {
        0 => Box::new(Block::new(disk()?, false, None)?),
        1 => Box::new(Block::new(disk()?, true, None)?),
        2 => Box::new(Entropy::new()),
        3 => Box::new(Balloon::new(Discard::new(memory)?)),
        _ => Box::new(Vsock::new(Arc::new(Unwatched))),
    };
    let interrupt = EventFd::new(EFD_NONBLOCK).map_err(|source| Error::Host { what: "eventfd", source })?;
    Transport::new(device, memory.clone(), interrupt)
}
