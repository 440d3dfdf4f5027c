//! virtio-balloon: the guest gives pages up, and the host takes them back.
//!
//! Two ways lead there. The host asks for a size ([`Balloon::set_target`]), and the driver inflates the balloon page by page until it
//! has it; such a page is the host's until the driver deflates. And the driver reports what happens to be free, in large
//! pieces; those it may use again at once.
//!
//! Memory is given up in blocks ([`Discard`]): a page in the balloon stays as it is until the whole block around it is in.

mod pages;

use std::io::Read;

use virtio_queue::{DescriptorChain, Queue, QueueT};

use self::pages::Pages;
use super::{Device, DeviceState, Io, Outcome, pop};
use crate::{
    error::Error,
    memory::{GuestMemory, discard::Discard},
};

const DEVICE_ID: u32 = 5;
pub(crate) const QUEUES: usize = REPORTING + 1;
// Features (linux/virtio_balloon.h).
const F_MUST_TELL_HOST: u32 = 0;
const F_DEFLATE_ON_OOM: u32 = 2;
const F_REPORTING: u32 = 5;

const INFLATE: usize = 0;
const DEFLATE: usize = 1;
/// The third queue, since those of the features in between are not offered and drivers count without them.
const REPORTING: usize = 2;
/// A page of the balloon, whatever pages the guest has otherwise.
const PAGE: u64 = 4096;
/// Pages named by one request at most. Linux names 256.
const LONGEST: usize = 16 * 1024;
/// What is served in one turn of the event loop.
const REQUESTS_PER_TURN: usize = 16;
const BYTES_PER_TURN: u64 = 128 << 20;

/// The device.
pub(crate) struct Balloon {
    discard: Discard,
    pages: Pages,
    /// Pages that the host wants, and pages that the driver says it gave.
    config: [u8; 8],
    has_complained: bool,
}

impl Balloon {
    /// An empty balloon over a VM's memory.
    pub(crate) fn new(discard: Discard) -> Self {
        let pages = Pages::none(discard.size() / PAGE);
        Self { discard, pages, config: [0; 8], has_complained: false }
    }

    /// Asks for a balloon of this size. The driver hears of it by the transport.
    pub(crate) fn set_target(&mut self, bytes: u64) -> Result<(), Error> {
        if bytes >= self.discard.size() {
            return Err(Error::Refused("a balloon must be smaller than the guest's memory"));
        }
        let pages = u32::try_from(bytes / PAGE).map_err(|_| Error::Refused("a balloon of that size has no number"))?;
        self.config[..4].copy_from_slice(&pages.to_le_bytes());
        Ok(())
    }

    /// What has become of the memory, for who puts it back as it was.
    pub(crate) fn discard(&mut self) -> &mut Discard {
        &mut self.discard
    }

    fn sizes(&self) -> [u32; 2] {
        let [a, b, c, d, e, f, g, h] = self.config;
        [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
    }

    /// A list of page numbers, all of them in memory.
    fn named(
        &self,
        memory: &GuestMemory,
        chain: DescriptorChain<&GuestMemory>,
    ) -> Result<Vec<u64>, virtio_queue::Error> {
        let mut reader = chain.reader(memory)?;
        let length = reader.available_bytes();
        if length > LONGEST * 4 {
            return Err(virtio_queue::Error::InvalidChain);
        }
        let mut list = vec![0; length];
        reader.read_exact(&mut list).map_err(|_| virtio_queue::Error::InvalidChain)?;
        let pages = list.as_chunks().0.iter().map(|number| u64::from(u32::from_le_bytes(*number)));
        let inside = |page| if page < self.discard.size() / PAGE { Ok(page) } else { Err(OUTSIDE) };
        pages.map(inside).collect()
    }

    /// The driver has put pages into the balloon. Returns the bytes given up.
    fn inflate(&mut self, named: &[u64]) -> u64 {
        named.iter().for_each(|page| self.pages.set(*page, true));
        let per_block = self.discard.block() / PAGE;
        let mut blocks: Vec<u64> = named.iter().map(|page| page / per_block).collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks.retain(|block| self.pages.all(block * per_block..(block + 1) * per_block));
        let mut given_up = 0;
        for run in blocks.chunk_by(|a, b| a + 1 == *b) {
            let start = run[0] * self.discard.block();
            given_up += self.give_up(start, run.len() as u64 * self.discard.block());
        }
        given_up
    }

    /// The driver reports free pages. Returns the bytes given up.
    fn reported(&mut self, chain: DescriptorChain<&GuestMemory>) -> Result<u64, virtio_queue::Error> {
        let pieces: Vec<_> = chain.writable().map(|piece| (piece.addr().0, u64::from(piece.len()))).collect();
        // More than there is can only be the same twice.
        let mut left = self.discard.size();
        for (start, length) in &pieces {
            left = left.checked_sub(*length).ok_or(virtio_queue::Error::InvalidChain)?;
            start.checked_add(*length).filter(|end| *end <= self.discard.size()).ok_or(OUTSIDE)?;
        }
        Ok(pieces.into_iter().map(|(start, length)| self.give_up(start, length)).sum())
    }

    /// Gives up what lies inside memory. A failure costs memory and nothing else, so the guest is not told.
    fn give_up(&mut self, start: u64, length: u64) -> u64 {
        match self.discard.give_up(start..start + length) {
            Ok(given_up) => given_up,
            Err(error) => {
                if !std::mem::replace(&mut self.has_complained, true) {
                    tracing::warn!(error = error.chain(), "memory that the guest gave up is kept");
                }
                0
            }
        }
    }

    fn serve(&mut self, queue: usize, memory: &GuestMemory, chain: DescriptorChain<&GuestMemory>) -> Served {
        match queue {
            INFLATE => {
                let named = self.named(memory, chain)?;
                Ok(self.inflate(&named))
            }
            DEFLATE => {
                let named = self.named(memory, chain)?;
                named.into_iter().for_each(|page| self.pages.set(page, false));
                Ok(0)
            }
            _ => self.reported(chain),
        }
    }
}

const OUTSIDE: virtio_queue::Error = virtio_queue::Error::FindMemoryRegion;

/// Bytes given up, or how the guest broke the rules.
type Served = Result<u64, virtio_queue::Error>;

impl Device for Balloon {
    fn id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        1 << F_MUST_TELL_HOST | 1 << F_DEFLATE_ON_OOM | 1 << F_REPORTING
    }

    fn queues(&self) -> usize {
        QUEUES
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    /// The driver says how much it has given; nothing here depends on it.
    fn write_config(&mut self, offset: usize, data: &[u8]) {
        if (4..8).contains(&offset) && offset + data.len() <= 8 {
            self.config[offset..offset + data.len()].copy_from_slice(data);
        }
    }

    fn notified(&mut self, index: usize, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        let memory = io.memory;
        let Some(queue) = io.queues.get_mut(index).filter(|queue: &&mut Queue| queue.ready()) else {
            return Ok(Outcome::default());
        };
        queue.disable_notification(memory)?;
        let (mut used, mut more, mut bytes) = (false, true, 0);
        for _ in 0..REQUESTS_PER_TURN {
            if let Some(chain) = pop(queue, memory)? {
                let head = chain.head_index();
                bytes += self.serve(index, memory, chain)?;
                queue.add_used(memory, head, 0)?;
                used = true;
            } else if !queue.enable_notification(memory)? {
                more = false;
                break;
            }
            if bytes >= BYTES_PER_TURN {
                break;
            }
        }
        Ok(Outcome { used: used && queue.needs_notification(memory)?, more })
    }

    fn reset(&mut self) {
        self.pages.clear();
        self.write_config(4, &[0; 4]);
    }

    fn save(&self) -> Result<DeviceState, Error> {
        let [target_pages, actual_pages] = self.sizes();
        Ok(DeviceState::Balloon { target_pages, actual_pages })
    }

    /// Which pages are in is not kept: they are holes in the image, and cost nothing until they are used again. Blocks that were in by
    /// halves stay so.
    fn restore(&mut self, saved: &DeviceState) -> Result<(), Error> {
        let DeviceState::Balloon { target_pages, actual_pages } = saved else {
            return Err(Error::Snapshot(format!("a device is a balloon, the snapshot has {saved:?}")));
        };
        self.set_target(u64::from(*target_pages) * PAGE)?;
        self.config[4..].copy_from_slice(&actual_pages.to_le_bytes());
        self.pages.clear();
        Ok(())
    }

    fn as_balloon(&mut self) -> Option<&mut Balloon> {
        Some(self)
    }
}

#[cfg(test)]
mod tests;
