//! Virtio devices: the mmio transport, block and vsock.

pub(crate) mod block;
mod transport;
pub(crate) mod vsock;

use std::os::fd::BorrowedFd;

use serde::{Deserialize, Serialize};
use virtio_queue::Queue;

pub(crate) use transport::{Transport, TransportState};

use crate::{error::Error, memory::GuestMemory};

/// Entries of every queue at most.
pub(crate) const QUEUE_SIZE: u16 = 256;

/// What a device works with while it handles an event.
pub(crate) struct Io<'a> {
    pub(crate) memory: &'a GuestMemory,
    pub(crate) queues: &'a mut [Queue],
}

/// Whether the guest must hear of what a device did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signal {
    None,
    Used,
}

/// The part of a device that the transport does not do.
pub(crate) trait Device: Send {
    /// Its virtio device id.
    fn id(&self) -> u32;
    /// Features offered beside those of the transport.
    fn features(&self) -> u64;
    /// Number of queues.
    fn queues(&self) -> usize;
    /// Its configuration space.
    fn config(&self) -> &[u8];
    /// The driver put something into a queue.
    fn notified(&mut self, queue: usize, io: &mut Io<'_>) -> Result<Signal, virtio_queue::Error>;
    /// The driver reset the device.
    fn reset(&mut self);
    /// What a snapshot must keep of it, or why there can be none now.
    fn save(&self) -> Result<DeviceState, Error>;
    /// The vsock device, if it is one.
    fn as_vsock(&mut self) -> Option<&mut vsock::Vsock> {
        None
    }
}

/// What a snapshot keeps of a device. A mismatch of kind is refused at restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DeviceState {
    Block { sectors: u64, read_only: bool },
    Vsock,
}

/// A source of events that a device wants watched.
pub(crate) trait Watch {
    /// Watches `fd` for what `interest` says; no interest ends the watch.
    fn watch(&self, fd: BorrowedFd<'_>, key: u64, interest: Interest) -> std::io::Result<()>;
}

/// What to be told of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Interest {
    pub(crate) read: bool,
    pub(crate) write: bool,
}

impl Interest {
    pub(crate) const NONE: Self = Self { read: false, write: false };
}
