//! Virtio devices: the mmio transport, block, vsock, net, rng and balloon.

pub(crate) mod balloon;
pub(crate) mod block;
#[cfg(test)]
mod driver;
pub(crate) mod net;
pub(crate) mod rate_limit;
pub(crate) mod rng;
mod transport;
pub(crate) mod vsock;
pub(crate) mod watch;

use std::{fs::File, sync::atomic::Ordering};

use serde::{Deserialize, Serialize};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};

pub(crate) use transport::{Transport, TransportState};
pub(crate) use watch::{Events, Watch};

use crate::{error::Error, memory::GuestMemory};

/// Entries of every queue at most.
pub(crate) const QUEUE_SIZE: u16 = 256;

/// What a device works with while it handles an event.
pub(crate) struct Io<'a> {
    pub(crate) memory: &'a GuestMemory,
    pub(crate) queues: &'a mut [Queue],
}

/// What came of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[must_use]
pub(crate) struct Outcome {
    /// The guest must hear that buffers were used.
    pub(crate) used: bool,
    /// The device has done its share for one turn and not all there was: call it again, after everything else had its turn.
    pub(crate) more: bool,
}

/// The next chain of a queue.
///
/// An index that runs away from the ring is an error here. `QueueT::pop_descriptor_chain` takes it for an empty ring, and
/// `enable_notification` then says for ever that there is something in it.
pub(crate) fn pop<'m>(
    queue: &mut Queue,
    memory: &'m GuestMemory,
) -> Result<Option<DescriptorChain<&'m GuestMemory>>, virtio_queue::Error> {
    if queue.ready() { Ok(queue.iter(memory)?.next()) } else { Ok(None) }
}

/// Whether there is something in a queue that was left there.
pub(crate) fn waits(queue: &Queue, memory: &GuestMemory) -> Result<bool, virtio_queue::Error> {
    Ok(queue.ready() && queue.avail_idx(memory, Ordering::Acquire)?.0 != queue.next_avail())
}

/// The part of a device that the transport does not do.
///
/// Beside the driver's notifications, a device may have sources of events of its own ([`watch::Sources`]). It hears of them while the
/// guest runs; when one is ready at another time, the device is told to be [`quiet`](Device::quiet), and to [`wake`](Device::wake) when
/// the guest runs again.
pub(crate) trait Device: Send {
    /// Its virtio device id.
    fn id(&self) -> u32;
    /// Features offered beside those of the transport.
    fn features(&self) -> u64;
    /// Number of queues.
    fn queues(&self) -> usize;
    /// Its configuration space.
    fn config(&self) -> &[u8];
    /// The driver writes to its configuration space, which is read-only in most devices.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}
    /// The driver put something into a queue.
    fn notified(&mut self, queue: usize, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error>;
    /// The driver is ready, or a restored one is, and uses these features.
    fn started(&mut self, _features: u64) -> Result<(), Error> {
        Ok(())
    }
    /// A source of its own is ready.
    fn source_ready(&mut self, _number: u8, _io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        Ok(Outcome::default())
    }
    /// Waits for none of its sources.
    fn quiet(&mut self) {}
    /// Takes up what was left: the guest runs, after a pause or for the first time.
    fn wake(&mut self, _io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        Ok(Outcome::default())
    }
    /// The driver reset the device.
    fn reset(&mut self);
    /// What a snapshot must keep of it, or why there can be none now.
    fn save(&self) -> Result<DeviceState, Error>;
    /// The same for a snapshot that may end what the device has open; it must then tell the guest when it is restored.
    fn save_cut(&self) -> Result<DeviceState, Error> {
        self.save()
    }
    /// Makes `to` a clone of its disk, if it has one that the guest can write. Returns whether it did.
    fn clone_disk(&self, _to: &File) -> Result<bool, Error> {
        Ok(false)
    }
    /// Takes over what a snapshot kept, or refuses what is another device's.
    fn restore(&mut self, saved: &DeviceState) -> Result<(), Error> {
        let own = self.save()?;
        if own == *saved {
            Ok(())
        } else {
            Err(Error::Snapshot(format!("a device is {own:?}, the snapshot has {saved:?}")))
        }
    }
    /// The vsock device, if it is one.
    fn as_vsock(&mut self) -> Option<&mut vsock::Vsock> {
        None
    }
    /// The balloon, if it is one.
    fn as_balloon(&mut self) -> Option<&mut balloon::Balloon> {
        None
    }
}

/// What a snapshot keeps of a device. A mismatch of kind is refused at restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DeviceState {
    Block {
        sectors: u64,
        read_only: bool,
    },
    Vsock,
    /// With connections, which are not in the snapshot.
    VsockCut,
    Net {
        mac: [u8; 6],
    },
    Rng,
    Balloon {
        target_pages: u32,
        actual_pages: u32,
    },
}
