//! virtio-rng: random bytes from the host's kernel.
//!
//! A restored guest's own generator is in the state of the snapshot; what it reads here never is.

use std::io::Write;

use rustix::rand::{GetRandomFlags, getrandom};
use virtio_queue::{DescriptorChain, QueueT};

use super::{Device, DeviceState, Io, Outcome, pop};
use crate::{error::Error, memory::GuestMemory};

const DEVICE_ID: u32 = 4;
pub(crate) const QUEUES: usize = 1;
/// Bytes given to one request at most; a driver asks again for more (virtio 1.2, section 5.4.6.2).
const LONGEST: usize = 4096;
/// Requests served in one turn of the event loop.
const REQUESTS_PER_TURN: usize = 16;

/// The device. It has no state at all.
pub(crate) struct Entropy;

impl Entropy {
    /// A source of random bytes.
    pub(crate) fn new() -> Self {
        Self
    }
}

/// Fills a request's buffers. Returns the bytes written.
fn fill(memory: &GuestMemory, chain: DescriptorChain<&GuestMemory>) -> Result<u32, virtio_queue::Error> {
    let mut writer = chain.writer(memory)?;
    let mut bytes = [0; LONGEST];
    let wanted = writer.available_bytes().min(LONGEST);
    let bytes = &mut bytes[..wanted];
    // More than 256 bytes may come short; the driver takes what there is.
    let length = match getrandom(&mut *bytes, GetRandomFlags::empty()) {
        Ok(length) => length,
        Err(error) => {
            tracing::warn!(%error, "no random bytes for the guest");
            0
        }
    };
    let written = writer.write(&bytes[..length]).unwrap_or(0); // the chain was checked when the writer was made
    Ok(u32::try_from(written).unwrap_or_default())
}

impl Device for Entropy {
    fn id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        0
    }

    fn queues(&self) -> usize {
        QUEUES
    }

    fn config(&self) -> &[u8] {
        &[]
    }

    fn notified(&mut self, _: usize, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        let memory = io.memory;
        let queue = &mut io.queues[0];
        if !queue.ready() {
            return Ok(Outcome::default());
        }
        queue.disable_notification(memory)?;
        let (mut used, mut more) = (false, true);
        for _ in 0..REQUESTS_PER_TURN {
            if let Some(chain) = pop(queue, memory)? {
                let head = chain.head_index();
                let written = fill(memory, chain)?;
                queue.add_used(memory, head, written)?;
                used = true;
            } else if !queue.enable_notification(memory)? {
                more = false;
                break;
            }
        }
        Ok(Outcome { used: used && queue.needs_notification(memory)?, more })
    }

    fn reset(&mut self) {}

    fn save(&self) -> Result<DeviceState, Error> {
        Ok(DeviceState::Rng)
    }
}

#[cfg(test)]
mod tests;
