//! A guest and an event loop for the tests of the vsock device.

use std::{
    collections::HashMap,
    io,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    os::unix::net::UnixStream,
    sync::{Arc, Mutex},
};

use vm_memory::{Bytes, GuestAddress};

use super::{GUEST_CID, RX, TX, Vsock, mux::HOST_CID};
use crate::virtio::{
    Events, Watch,
    driver::{Buffer, Driver},
};

const RX_BUFFERS: u64 = 0x20_0000;
const RX_STRIDE: u64 = 0x1100;
const TX_HEADERS: u64 = 0x30_0000;
const TX_PACKETS: u64 = 0x40_0000;
const HEADER: usize = 44;
/// Room for data in a receive buffer.
pub(crate) const ROOM: u32 = 4096;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Packet {
    pub(crate) host: u32,
    pub(crate) guest: u32,
    pub(crate) op: u16,
    pub(crate) flags: u32,
    pub(crate) credit: (u32, u32),
    pub(crate) data: Vec<u8>,
}

/// What an epoll instance would hold.
#[derive(Default)]
struct Watched(Mutex<HashMap<u64, (RawFd, Events)>>);

impl Watch for Watched {
    fn watch(&self, fd: BorrowedFd<'_>, key: u64, events: Events) -> io::Result<()> {
        let mut watched = self.0.lock().unwrap();
        match events {
            Events::NONE => drop(watched.remove(&key)),
            _ => drop(watched.insert(key, (fd.as_raw_fd(), events))),
        }
        Ok(())
    }
}

pub(crate) struct Rig {
    pub(crate) driver: Driver,
    watched: Arc<Watched>,
    sent: u64,
    /// Where each receive buffer is, by its head.
    buffers: HashMap<u16, u64>,
}

impl Rig {
    /// A device and a guest with `buffers` receive buffers.
    pub(crate) fn new(buffers: u64) -> Self {
        let watched = Arc::new(Watched::default());
        let driver = Driver::live(Box::new(Vsock::new(watched.clone())));
        let mut rig = Self { driver, watched, sent: 0, buffers: HashMap::new() };
        (0..buffers).for_each(|index| rig.add_buffer(RX_BUFFERS + index * RX_STRIDE));
        rig.settle();
        rig
    }

    pub(crate) fn add_buffer(&mut self, at: u64) {
        let length = u32::try_from(HEADER).unwrap() + ROOM;
        let head = self.driver.add(RX, &[Buffer(at, length, true)]);
        self.buffers.insert(head, at);
    }

    /// One more receive buffer, beside those of the start.
    pub(crate) fn spare_buffer(&mut self) {
        self.add_buffer(RX_BUFFERS + 200 * RX_STRIDE);
    }

    pub(crate) fn vsock<T>(&mut self, look: impl FnOnce(&mut Vsock) -> T) -> T {
        look(self.driver.transport.device().as_vsock().unwrap())
    }

    pub(crate) fn connect(&mut self, port: u32) -> UnixStream {
        let (near, far) = UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        let more =
            self.driver.transport.drive(|device, io| device.as_vsock().unwrap().connect(near, port, io)).unwrap();
        assert!(!more || self.driver.transport.queue_count() == 3);
        self.settle();
        far
    }

    /// The event loop, until nothing happens any more. One that never comes to rest fails the test.
    pub(crate) fn settle(&mut self) {
        for _ in 0..20_000 {
            let more = self.driver.turn(TX);
            let happened = self.events();
            if !more && happened.is_empty() {
                return;
            }
            for (key, events) in happened {
                self.driver
                    .transport
                    .drive(|device, io| device.as_vsock().unwrap().stream_ready(key, events, io))
                    .unwrap();
            }
        }
        panic!("the event loop spins");
    }

    fn events(&self) -> Vec<(u64, Events)> {
        let happened = |(key, (fd, wanted)): (&u64, &(RawFd, Events))| {
            let mask = if wanted.read { libc::POLLIN } else { 0 } | if wanted.write { libc::POLLOUT } else { 0 };
            let mut poll = libc::pollfd { fd: *fd, events: mask, revents: 0 };
            // SAFETY: one entry, which lives through the call.
            let count = unsafe { libc::poll(&raw mut poll, 1, 0) };
            let hangup = poll.revents & (libc::POLLHUP | libc::POLLERR) != 0;
            let on = |bit| hangup || poll.revents & bit != 0;
            (count > 0).then(|| (*key, Events { read: on(libc::POLLIN), write: on(libc::POLLOUT), hangup }))
        };
        self.watched.0.lock().unwrap().iter().filter_map(happened).collect()
    }

    pub(crate) fn watched(&self) -> usize {
        self.watched.0.lock().unwrap().len()
    }

    /// Puts a packet into the transmit queue.
    pub(crate) fn queue(&mut self, packet: &Packet) {
        self.queue_raw(packet, [GUEST_CID, HOST_CID], 1, u32::try_from(packet.data.len()).unwrap());
    }

    pub(crate) fn queue_raw(&mut self, packet: &Packet, cids: [u64; 2], kind: u16, length: u32) {
        let Packet { host, guest, op, flags, credit, data } = packet;
        let mut bytes = cids.map(u64::to_le_bytes).concat();
        bytes.extend([*guest, *host, length].map(u32::to_le_bytes).concat());
        bytes.extend([kind, *op].map(u16::to_le_bytes).concat());
        bytes.extend([*flags, credit.0, credit.1].map(u32::to_le_bytes).concat());
        bytes.extend(data);
        let at = match data.is_empty() {
            true => TX_HEADERS + self.sent % 256 * 64,
            false => TX_PACKETS + self.sent % 16 * 0x1_1000,
        };
        self.sent += 1;
        self.driver.memory.write_slice(&bytes, GuestAddress(at)).unwrap();
        self.driver.add(TX, &[Buffer(at, u32::try_from(bytes.len()).unwrap(), false)]);
    }

    pub(crate) fn send(&mut self, packet: &Packet) {
        self.queue(packet);
        self.settle();
        self.driver.used(TX);
    }

    /// The packets in the receive queue, whose buffers go back into it.
    pub(crate) fn receive(&mut self) -> Vec<Packet> {
        let packets = self.receive_and_keep();
        self.settle();
        packets
    }

    fn receive_and_keep(&mut self) -> Vec<Packet> {
        let used = self.driver.used(RX);
        let mut packets = Vec::new();
        for (head, length) in used {
            let at = self.buffers.remove(&head).unwrap();
            packets.push(self.packet_at(at, length));
            self.add_buffer(at);
        }
        packets
    }

    fn packet_at(&self, at: u64, length: u32) -> Packet {
        let mut bytes = vec![0; length as usize];
        self.driver.memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        let word = |offset| u32::from_le_bytes(<[u8; 4]>::try_from(&bytes[offset..offset + 4]).unwrap());
        assert_eq!((bytes[0], bytes[8], bytes[28]), (2, 3, 1), "from the host, to the guest, a stream");
        let data = bytes[HEADER..].to_vec();
        assert_eq!(word(24) as usize, data.len());
        let op = u16::from_le_bytes([bytes[30], bytes[31]]);
        Packet { host: word(16), guest: word(20), op, flags: word(32), credit: (word(36), word(40)), data }
    }
}
