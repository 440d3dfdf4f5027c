//! One connection: a stream socket on the host's side, credit counters on the guest's.
//!
//! ```text
//!  host connects:   requested ── RESPONSE ──▶ open
//!  guest connects:                            open
//!  open: each direction ends on its own (host's EOF → SHUTDOWN; guest's SHUTDOWN → shutdown(2) once written out);
//!  over when both have ended, when the host has closed its end for good, or when either side broke it off.
//! ```

use std::{
    collections::VecDeque,
    io::{self, ErrorKind, Write},
    net::Shutdown,
    num::Wrapping,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
};

use virtio_vsock::packet::VsockPacket;
use vm_memory::{ReadVolatile, VolatileMemoryError, bitmap::BitmapSlice};

use crate::virtio::Events;

/// Bytes that the guest may have under way to a stream.
const BUFFER: u32 = 256 * 1024;
/// The guest is told of room once this much has come free.
const TELL_CREDIT_AFTER: u32 = BUFFER / 4;
/// Flags of SHUTDOWN: the sender will receive no more, will send no more.
const NO_RECEIVE: u32 = 1;
const NO_SEND: u32 = 2;

/// The ports of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) host_port: u32,
    pub(super) guest_port: u32,
}

impl From<Key> for u64 {
    fn from(key: Key) -> Self {
        Self::from(key.host_port) << 32 | Self::from(key.guest_port)
    }
}

impl From<u64> for Key {
    fn from(number: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = number.to_be_bytes();
        Self { host_port: u32::from_be_bytes([a, b, c, d]), guest_port: u32::from_be_bytes([e, f, g, h]) }
    }
}

/// What a read from the stream gave.
pub(super) enum Fill {
    Bytes(usize),
    /// None now, or none ever again.
    Nothing,
}

/// A connection.
pub(super) struct Connection {
    stream: UnixStream,
    open: bool,
    broken: bool,
    /// What the event loop watches now.
    pub(super) watched: Events,
    /// The stream has been read empty: watch it.
    pub(super) wants_read: bool,
    /// The other end of the stream is closed; what it sent before may still be unread.
    pub(super) hung_up: bool,

    // host → guest
    peer_buffer: u32,
    peer_forwarded: Wrapping<u32>,
    sent: Wrapping<u32>,
    starved: bool,
    host_ended: bool,
    shutdown_told: bool,
    guest_receives: bool,

    // guest → host
    backlog: VecDeque<u8>,
    forwarded: Wrapping<u32>,
    forwarded_told: Wrapping<u32>,
    guest_ended: bool,
    write_closed: bool,
}

impl Connection {
    fn new(stream: UnixStream, open: bool) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            open,
            broken: false,
            watched: Events::NONE,
            wants_read: open,
            hung_up: false,
            peer_buffer: 0,
            peer_forwarded: Wrapping(0),
            sent: Wrapping(0),
            starved: false,
            host_ended: false,
            shutdown_told: false,
            guest_receives: true,
            backlog: VecDeque::new(),
            forwarded: Wrapping(0),
            forwarded_told: Wrapping(0),
            guest_ended: false,
            write_closed: false,
        })
    }

    /// The host has asked for it; the stream is left alone until the guest accepts.
    pub(super) fn requested(stream: UnixStream) -> io::Result<Self> {
        Self::new(stream, false)
    }

    /// The guest has asked for it.
    pub(super) fn accepted(stream: UnixStream) -> io::Result<Self> {
        Self::new(stream, true)
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// The guest has accepted.
    pub(super) fn established(&mut self) {
        if !self.open {
            self.open = true;
            self.starved = true; // there is credit now: look at the stream at once
        }
    }

    /// The guest's room, as told by every packet.
    pub(super) fn note_credit(&mut self, buffer: u32, forwarded: u32) {
        self.peer_buffer = buffer;
        self.peer_forwarded = Wrapping(forwarded);
    }

    fn credit(&self) -> u32 {
        self.peer_buffer.saturating_sub((self.sent - self.peer_forwarded).0)
    }

    /// Once after each time that reading stopped for want of credit.
    pub(super) fn may_read_again(&mut self) -> bool {
        self.open && self.credit() > 0 && std::mem::take(&mut self.starved)
    }

    /// Reads what fits into `packet`, its buffer and the guest's credit.
    pub(super) fn read_into<B: BitmapSlice>(&mut self, packet: &VsockPacket<'_, B>) -> Fill {
        if !self.open || self.host_ended || self.broken || !self.guest_receives {
            return Fill::Nothing;
        }
        if self.credit() == 0 {
            self.starved = true;
            return Fill::Nothing;
        }
        let Some(room) = packet.data_slice() else {
            self.broken = true; // a buffer for receiving that has room for nothing
            return Fill::Nothing;
        };
        let length = room.len().min(self.credit() as usize);
        let Ok(mut room) = room.subslice(0, length) else { return Fill::Nothing };
        match self.stream.read_volatile(&mut room) {
            Ok(0) => {
                self.host_ended = true;
                Fill::Nothing
            }
            Ok(read) => {
                self.sent += Wrapping(u32::try_from(read).unwrap_or_default());
                Fill::Bytes(read)
            }
            Err(VolatileMemoryError::IOError(error))
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                self.wants_read = true;
                Fill::Nothing
            }
            Err(_) => {
                self.broken = true;
                Fill::Nothing
            }
        }
    }

    /// Takes the payload of the guest's packet.
    pub(super) fn write_from<B: BitmapSlice>(&mut self, packet: &VsockPacket<'_, B>) {
        let length = packet.len() as usize;
        let Some(data) = packet.data_slice().filter(|data| data.len() >= length) else {
            self.broken |= length > 0;
            return;
        };
        if !self.open || self.guest_ended || self.backlog.len() + length > BUFFER as usize {
            self.broken = true; // the guest broke the protocol
            return;
        }
        let mut payload = vec![0; length];
        data.copy_to(&mut payload);
        self.backlog.extend(payload);
        self.flush();
    }

    /// Writes to the stream what it takes.
    pub(super) fn flush(&mut self) {
        while !self.backlog.is_empty() {
            let (front, _) = self.backlog.as_slices();
            match self.stream.write(front) {
                Ok(written) => {
                    self.backlog.drain(..written);
                    self.forwarded += Wrapping(u32::try_from(written).unwrap_or_default());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.broken = true;
                    return;
                }
            }
        }
        if self.guest_ended && !self.write_closed {
            self.write_closed = true;
            self.broken |= self.stream.shutdown(Shutdown::Write).is_err();
        }
    }

    /// The guest will send, or receive, no more.
    pub(super) fn guest_shutdown(&mut self, flags: u32) {
        self.guest_ended |= flags & NO_SEND != 0;
        if flags & NO_RECEIVE != 0 && std::mem::replace(&mut self.guest_receives, false) {
            // Whoever still writes learns that nobody reads.
            let _ = self.stream.shutdown(Shutdown::Read);
        }
        self.flush();
    }

    /// Both directions have ended, or one broke.
    pub(super) fn is_over(&self) -> bool {
        let written_out = self.guest_ended && self.backlog.is_empty();
        let read_out = self.host_ended || !self.guest_receives;
        self.broken || read_out && (written_out || self.hung_up)
    }

    /// What to watch the stream for.
    pub(super) fn interest(&self) -> Events {
        let read_out = self.host_ended || !self.guest_receives;
        Events { read: self.open && self.wants_read && !read_out, write: !self.backlog.is_empty(), hangup: read_out }
    }

    /// Once, after the host's end: the flags of the SHUTDOWN that tells the guest.
    pub(super) fn take_shutdown(&mut self) -> Option<u32> {
        let due = self.host_ended && !std::mem::replace(&mut self.shutdown_told, self.host_ended);
        due.then_some(NO_SEND)
    }

    /// When enough room has come free since the guest last heard of it.
    pub(super) fn take_credit_update(&mut self) -> Option<u32> {
        let due = (self.forwarded - self.forwarded_told).0 >= TELL_CREDIT_AFTER;
        if due {
            self.forwarded_told = self.forwarded;
        }
        due.then_some(0)
    }

    /// Our room, to be told in every packet.
    pub(super) fn credit_to_tell(&mut self) -> (u32, u32) {
        self.forwarded_told = self.forwarded;
        (BUFFER, self.forwarded.0)
    }
}
