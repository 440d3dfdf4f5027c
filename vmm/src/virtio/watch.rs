//! How devices have descriptors watched by the event loop.

use std::{io, os::fd::BorrowedFd, sync::Arc};

/// Keys with this bit are those of [`Sources`]; vsock's streams have the keys below it.
pub(crate) const SOURCE: u64 = 1 << 62;
/// Bits of a key that say which of its device's sources it is.
const NUMBER_BITS: u32 = 8;

/// A source of events that a device wants watched.
pub(crate) trait Watch {
    /// Watches `fd` for `events`; none ends the watch.
    fn watch(&self, fd: BorrowedFd<'_>, key: u64, events: Events) -> io::Result<()>;
}

/// What is watched for, or has happened, on a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Events {
    pub(crate) read: bool,
    pub(crate) write: bool,
    /// Both directions are over. Told whenever anything is watched for; alone, it watches for nothing else.
    pub(crate) hangup: bool,
}

impl Events {
    pub(crate) const NONE: Self = Self { read: false, write: false, hangup: false };
    pub(crate) const READ: Self = Self { read: true, ..Self::NONE };
}

/// The descriptors that belong to one device for its whole life, by number.
#[derive(Clone)]
pub(crate) struct Sources {
    watch: Arc<dyn Watch + Send + Sync>,
    device: usize,
}

impl Sources {
    /// Those of the device at this place of the bus.
    pub(crate) fn new(watch: Arc<dyn Watch + Send + Sync>, device: usize) -> Self {
        Self { watch, device }
    }

    /// Watches `fd`, which is this device's source of that number; no events end the watch.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, number: u8, events: Events) -> io::Result<()> {
        self.watch.watch(fd, SOURCE | (self.device as u64) << NUMBER_BITS | u64::from(number), events)
    }
}

/// The device and the number of the source that a key is of, if it is of one.
pub(crate) fn source_of(key: u64) -> Option<(usize, u8)> {
    let number = u8::try_from(key % (1 << NUMBER_BITS)).ok()?;
    let device = usize::try_from((key & !SOURCE) >> NUMBER_BITS).ok()?;
    (key & SOURCE != 0).then_some((device, number))
}
