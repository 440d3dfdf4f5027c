//! All connections of one guest, and what is to be sent next.
//!
//! Output is either a control packet (in order, first) or the next bytes of a stream that has some. While a stream waits in
//! `ready`, it is not watched for reading, so that an event loop never spins on bytes the guest has no room for.

use std::{
    collections::{HashMap, VecDeque},
    os::unix::net::UnixStream,
    sync::Arc,
};

use virtio_vsock::packet::VsockPacket;
use vm_memory::bitmap::BitmapSlice;

use super::{
    GUEST_CID,
    connection::{Connection, Fill, Key},
};
use crate::virtio::{Events, Watch, watch::SOURCE};

pub(super) const HOST_CID: u64 = 2;
pub(super) const TYPE_STREAM: u16 = 1;

/// Operations (virtio 1.2, section 5.10.6).
pub(super) mod op {
    pub(crate) const REQUEST: u16 = 1;
    pub(crate) const RESPONSE: u16 = 2;
    pub(crate) const RST: u16 = 3;
    pub(crate) const SHUTDOWN: u16 = 4;
    pub(crate) const RW: u16 = 5;
    pub(crate) const CREDIT_UPDATE: u16 = 6;
    pub(crate) const CREDIT_REQUEST: u16 = 7;
}

/// Most connections at once: with what else is open they stay below the usual limit of 1024 descriptors.
pub(super) const MAX_CONNECTIONS: usize = 512;
/// Control packets that may wait before input is no longer taken.
pub(super) const MAX_CONTROL: usize = 256;
/// Host ports of connections made by the host, which the guest sees as the peer's port. It can connect to none of them.
pub(super) const FIRST_EPHEMERAL: u32 = 0x2000_0000;
/// Host ports stay below, so that a [`Key`] as a number is no other source's.
const PORT_LIMIT: u32 = 0x4000_0000;
const _: () = assert!((PORT_LIMIT as u64) << 32 <= SOURCE);

struct Control {
    key: Key,
    op: u16,
    flags: u32,
}

/// The connections.
pub(super) struct Mux {
    watch: Arc<dyn Watch + Send + Sync>,
    connections: HashMap<Key, Connection>,
    control: VecDeque<Control>,
    ready: VecDeque<Key>,
    accepted: Vec<(u32, UnixStream)>,
    next_port: u32,
}

impl Mux {
    pub(super) fn new(watch: Arc<dyn Watch + Send + Sync>) -> Self {
        Self {
            watch,
            connections: HashMap::new(),
            control: VecDeque::new(),
            ready: VecDeque::new(),
            accepted: Vec::new(),
            next_port: FIRST_EPHEMERAL,
        }
    }

    /// Nothing is open and nothing is to be sent.
    pub(super) fn is_idle(&self) -> bool {
        self.connections.is_empty() && self.control.is_empty()
    }

    /// There may be something to [`Mux::fill`] a packet with.
    pub(super) fn has_output(&self) -> bool {
        !self.control.is_empty() || !self.ready.is_empty()
    }

    /// The control packets that input may cause still have room.
    pub(super) fn accepts_input(&self) -> bool {
        self.control.len() < MAX_CONTROL
    }

    #[cfg(test)]
    pub(super) fn control_waiting(&self) -> usize {
        self.control.len()
    }

    pub(super) fn take_accepted(&mut self) -> Vec<(u32, UnixStream)> {
        std::mem::take(&mut self.accepted)
    }

    /// Forgets everything; dropped streams tell their other ends.
    pub(super) fn reset(&mut self) {
        *self = Self::new(Arc::clone(&self.watch));
    }

    /// A connection made by the host.
    pub(super) fn connect(&mut self, stream: UnixStream, guest_port: u32) {
        let host_port = self.next_port;
        self.next_port = if host_port + 1 < PORT_LIMIT { host_port + 1 } else { FIRST_EPHEMERAL };
        let key = Key { host_port, guest_port };
        // Dropping the stream is the refusal.
        if self.connections.len() >= MAX_CONNECTIONS || self.connections.contains_key(&key) {
            return;
        }
        if let Ok(connection) = Connection::requested(stream) {
            self.connections.insert(key, connection);
            self.push(key, op::REQUEST, 0);
        }
    }

    /// What was watched for on a stream has happened.
    pub(super) fn stream_ready(&mut self, key: u64, events: Events) {
        let key = Key::from(key);
        let Some(connection) = self.connections.get_mut(&key) else { return };
        connection.hung_up |= events.hangup;
        if events.write {
            connection.flush();
        }
        if events.read {
            connection.wants_read = false;
            self.queue_for_reading(key);
        }
        self.settle(key);
    }

    fn queue_for_reading(&mut self, key: Key) {
        if !self.ready.contains(&key) {
            self.ready.push_back(key);
        }
    }

    /// Writes the next thing for the guest into `packet`; returns its payload's length, or `None` if there was nothing after all.
    pub(super) fn fill<B: BitmapSlice>(&mut self, packet: &mut VsockPacket<'_, B>) -> Option<usize> {
        loop {
            if let Some(Control { key, op, flags }) = self.control.pop_front() {
                self.address(packet, key, op).set_flags(flags);
                return Some(0);
            }
            let key = self.ready.pop_front()?;
            let Some(connection) = self.connections.get_mut(&key) else { continue };
            match connection.read_into(packet) {
                Fill::Bytes(length) => {
                    self.ready.push_back(key);
                    self.address(packet, key, op::RW).set_len(u32::try_from(length).unwrap_or_default());
                    return Some(length);
                }
                // Settling may queue what tells the guest of an end: it goes out in this very packet.
                Fill::Nothing => self.settle(key),
            }
        }
    }

    /// Takes one packet of the guest.
    pub(super) fn take<B: BitmapSlice>(&mut self, packet: &VsockPacket<'_, B>) {
        let key = Key { host_port: packet.dst_port(), guest_port: packet.src_port() };
        let operation = packet.op();
        let ours = packet.type_() == TYPE_STREAM && packet.dst_cid() == HOST_CID && packet.src_cid() == GUEST_CID;
        if !ours || key.host_port >= PORT_LIMIT {
            return self.refuse(key, operation);
        }
        if operation == op::REQUEST {
            return self.accept(key, packet);
        }
        let Some(connection) = self.connections.get_mut(&key) else { return self.refuse(key, operation) };
        connection.note_credit(packet.buf_alloc(), packet.fwd_cnt());
        match operation {
            op::RESPONSE => connection.established(),
            op::RST => {
                self.remove(key);
                return;
            }
            op::SHUTDOWN => connection.guest_shutdown(packet.flags()),
            op::RW => connection.write_from(packet),
            op::CREDIT_REQUEST => self.push(key, op::CREDIT_UPDATE, 0),
            _ => {}
        }
        if self.connections.get_mut(&key).is_some_and(Connection::may_read_again) {
            self.queue_for_reading(key);
        }
        self.settle(key);
    }

    fn accept<B: BitmapSlice>(&mut self, key: Key, packet: &VsockPacket<'_, B>) {
        let full = self.connections.len() + self.accepted.len() >= MAX_CONNECTIONS;
        if full || key.host_port >= FIRST_EPHEMERAL || self.connections.contains_key(&key) {
            return self.refuse(key, op::REQUEST);
        }
        let made = UnixStream::pair().and_then(|(near, far)| Ok((Connection::accepted(near)?, far)));
        let Ok((mut connection, far)) = made else { return self.refuse(key, op::REQUEST) };
        connection.note_credit(packet.buf_alloc(), packet.fwd_cnt());
        self.connections.insert(key, connection);
        self.accepted.push((key.host_port, far));
        self.push(key, op::RESPONSE, 0);
        self.settle(key);
    }

    /// Answers what fits no connection, unless it was a reset itself.
    fn refuse(&mut self, key: Key, operation: u16) {
        if operation != op::RST {
            self.push(key, op::RST, 0);
        }
    }

    /// Brings the outside in line with a connection's state: tells the guest, closes, watches.
    fn settle(&mut self, key: Key) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        if connection.is_over() {
            self.remove(key);
            self.push(key, op::RST, 0);
            return;
        }
        let announcements =
            [(connection.take_shutdown(), op::SHUTDOWN), (connection.take_credit_update(), op::CREDIT_UPDATE)];
        let interest = connection.interest();
        if interest != connection.watched {
            match self.watch.watch(connection.fd(), key.into(), interest) {
                Ok(()) => connection.watched = interest,
                Err(error) => {
                    tracing::warn!(%error, "a vsock stream cannot be watched");
                    self.remove(key);
                    self.push(key, op::RST, 0);
                    return;
                }
            }
        }
        for (flags, operation) in announcements {
            if let Some(flags) = flags {
                self.push(key, operation, flags);
            }
        }
    }

    fn remove(&mut self, key: Key) {
        self.ready.retain(|waiting| *waiting != key);
        if let Some(mut connection) = self.connections.remove(&key) {
            connection.flush();
            if connection.watched != Events::NONE {
                // The descriptor is about to close, which ends the watch too.
                let _ = self.watch.watch(connection.fd(), key.into(), Events::NONE);
            }
        }
    }

    fn push(&mut self, key: Key, op: u16, flags: u32) {
        self.control.push_back(Control { key, op, flags });
    }

    fn address<'p, 'm, B: BitmapSlice>(
        &mut self,
        packet: &'p mut VsockPacket<'m, B>,
        key: Key,
        op: u16,
    ) -> &'p mut VsockPacket<'m, B> {
        let (allocated, forwarded) = self.connections.get_mut(&key).map_or((0, 0), Connection::credit_to_tell);
        packet
            .set_src_cid(HOST_CID)
            .set_dst_cid(GUEST_CID)
            .set_src_port(key.host_port)
            .set_dst_port(key.guest_port)
            .set_type(TYPE_STREAM)
            .set_op(op)
            .set_len(0)
            .set_flags(0)
            .set_buf_alloc(allocated)
            .set_fwd_cnt(forwarded)
    }
}
