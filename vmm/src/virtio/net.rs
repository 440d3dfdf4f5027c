//! virtio-net over a TAP interface: one pair of queues, checksums and segmentation left to whoever does them last.
//!
//! ```text
//!              ┌── TAP empty ──► its readability is watched
//! receive: TAP ┼── no buffer ──► the driver tells of new ones (the TAP drops what it cannot queue)
//!              └── rate used up ──► the timer
//! ```
//!
//! A frame takes one chain of buffers: merging several (MRG_RXBUF) would need their use to be published at once, which the queue's
//! crate cannot do.

mod tap;

use std::{
    fs::File,
    io::{ErrorKind, Read, Write},
    os::fd::AsFd,
};

use stasis_vmm_api::Network;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_MAC, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_NONE,
};
use virtio_queue::{QueueOwnedT, QueueT};

use self::tap::Tap;
use super::{
    Device, DeviceState, Io, Outcome, pop,
    rate_limit::Limiter,
    waits,
    watch::{Events, Sources},
};
use crate::error::{Error, Host};

/// Frames to look for in a TAP: more than wait in one of the usual queue length (500, `TUN_READQ_SIZE` of drivers/net/tun.c).
const TAP_QUEUE: usize = 10_000;
const DEVICE_ID: u32 = 1;
pub(crate) const QUEUES: usize = 2;
const RX: usize = 0;
const TX: usize = 1;
/// The device's sources of events.
const TAP: u8 = 0;
const RX_TIMER: u8 = 1;
const TX_TIMER: u8 = 2;

/// Bytes of the header before every frame (virtio 1.2, section 5.1.6).
const HEADER: usize = 12;
const NUM_BUFFERS: std::ops::Range<usize> = 10..12;
const ETHERNET: usize = 14;
/// Bit of an address's first byte that says that it is many interfaces'.
const GROUP: u8 = 1;
/// Longest frame with its header: 64 KiB of segments to be cut, Ethernet's header, and room for VLAN tags.
const LONGEST: usize = HEADER + ETHERNET + 8 + 65_536;
/// Frames moved in one turn of the event loop, each way.
const FRAMES_PER_TURN: usize = 64;

/// A network interface.
pub(crate) struct Net {
    tap: Tap,
    mac: [u8; 6],
    sources: Sources,
    /// Whether the TAP's readability is watched.
    watched: bool,
    /// The TAP is of no more use: its interface was deleted.
    gone: bool,
    /// Features that the driver uses.
    features: u64,
    buffer: Vec<u8>,
    rx: Option<Limiter>,
    tx: Option<Limiter>,
}

impl Net {
    /// An interface over an open TAP.
    pub(crate) fn new(tap: File, network: &Network, sources: Sources) -> Result<Self, Error> {
        if network.mac[0] & GROUP != 0 || network.mac == [0; 6] {
            return Err(Error::Refused("a network's address must be that of one interface"));
        }
        let limiter = |number| network.rate.map(|rate| Limiter::new(rate, &sources, number)).transpose();
        let (rx, tx) = (limiter(RX_TIMER)?, limiter(TX_TIMER)?);
        let (mac, buffer) = (network.mac, vec![0; LONGEST]);
        Ok(Self { tap: Tap::new(tap)?, mac, sources, watched: false, gone: false, features: 0, buffer, rx, tx })
    }

    /// Hands the TAP's frames to the driver.
    fn receive(&mut self, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        let memory = io.memory;
        let queue = &mut io.queues[RX];
        if !queue.ready() || self.gone {
            return Ok(Outcome::default());
        }
        let (mut used, mut more, mut is_empty) = (false, true, false);
        for _ in 0..FRAMES_PER_TURN {
            if !self.rx.as_mut().is_none_or(Limiter::admits) {
                more = false;
                break;
            }
            let Some(chain) = pop(queue, memory)? else {
                if queue.enable_notification(memory)? {
                    continue;
                }
                more = false;
                break;
            };
            let length = match self.tap.receive(&mut self.buffer) {
                Ok(length) => length,
                Err(error) => {
                    queue.go_to_previous_position();
                    if error.kind() != ErrorKind::Interrupted {
                        is_empty = error.kind() == ErrorKind::WouldBlock;
                        self.gone = !is_empty;
                        more = false;
                        break;
                    }
                    continue;
                }
            };
            if let Some(limiter) = &mut self.rx {
                limiter.charge(length.saturating_sub(HEADER) as u64);
            }
            let head = chain.head_index();
            let mut writer = chain.writer(memory)?;
            let frame = &mut self.buffer[..length];
            if !takes(self.features, frame) || writer.available_bytes() < length {
                queue.go_to_previous_position(); // the frame is lost, the buffer is not
                continue;
            }
            frame[NUM_BUFFERS].copy_from_slice(&1_u16.to_le_bytes());
            let written = if writer.write_all(frame).is_ok() { length } else { 0 };
            queue.add_used(memory, head, u32::try_from(written).unwrap_or_default())?;
            used = true;
        }
        if self.gone {
            tracing::warn!("the TAP of a network interface is gone; nothing is received any more");
        }
        let used = used && queue.needs_notification(memory)?;
        self.listen(is_empty);
        Ok(Outcome { used, more })
    }

    /// Sends the driver's frames.
    fn transmit(&mut self, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        let memory = io.memory;
        let queue = &mut io.queues[TX];
        if !queue.ready() {
            return Ok(Outcome::default());
        }
        queue.disable_notification(memory)?;
        let (mut used, mut more) = (false, true);
        for _ in 0..FRAMES_PER_TURN {
            // Only a frame that waits is held back: over an empty queue, the driver must tell of the next one.
            if waits(queue, memory)? && !self.tx.as_mut().is_none_or(Limiter::admits) {
                more = false;
                break;
            }
            let Some(chain) = pop(queue, memory)? else {
                if queue.enable_notification(memory)? {
                    continue;
                }
                more = false;
                break;
            };
            let head = chain.head_index();
            let mut reader = chain.reader(memory)?;
            let length = reader.available_bytes();
            if (HEADER + ETHERNET..=LONGEST).contains(&length) && reader.read_exact(&mut self.buffer[..length]).is_ok()
            {
                // A frame that the host will not have is lost, as on any wire.
                if let Err(error) = self.tap.send(&self.buffer[..length]) {
                    tracing::debug!(%error, "the host does not take a frame");
                }
            }
            if let Some(limiter) = &mut self.tx {
                limiter.charge(length.saturating_sub(HEADER) as u64);
            }
            queue.add_used(memory, head, 0)?;
            used = true;
        }
        Ok(Outcome { used: used && queue.needs_notification(memory)?, more })
    }

    fn exchange(&mut self, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        let sent = self.transmit(io)?;
        let received = self.receive(io)?;
        Ok(Outcome { used: sent.used || received.used, more: sent.more || received.more })
    }

    /// Watches the TAP, or does so no more.
    fn listen(&mut self, watched: bool) {
        if watched != self.watched {
            let events = if watched { Events::READ } else { Events::NONE };
            match self.sources.watch(self.tap.as_fd(), TAP, events) {
                Ok(()) => self.watched = watched,
                Err(error) => tracing::error!(%error, "a TAP cannot be watched"),
            }
        }
    }
}

/// Whether a driver with these features takes a frame with this header. Only one that was queued for another driver is not so.
fn takes(features: u64, frame: &[u8]) -> bool {
    let [flags, segments, ..] = frame else { return false };
    let plain = u32::from(*flags) & VIRTIO_NET_HDR_F_NEEDS_CSUM == 0 && u32::from(*segments) == VIRTIO_NET_HDR_GSO_NONE;
    frame.len() >= HEADER && (plain || features & 1 << VIRTIO_NET_F_GUEST_CSUM != 0)
}

impl Device for Net {
    fn id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_NET_F_MAC | self.tap.features()
    }

    fn queues(&self) -> usize {
        QUEUES
    }

    fn config(&self) -> &[u8] {
        &self.mac
    }

    fn notified(&mut self, _: usize, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        self.exchange(io)
    }

    fn started(&mut self, features: u64) -> Result<(), Error> {
        self.features = features;
        self.tap.set_driver(features).host("TUNSETOFFLOAD")
    }

    fn source_ready(&mut self, number: u8, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        let timer = match number {
            RX_TIMER => &self.rx,
            TX_TIMER => &self.tx,
            _ => &None,
        };
        if let Some(limiter) = timer {
            limiter.disarm();
        }
        self.exchange(io)
    }

    fn quiet(&mut self) {
        self.listen(false);
        [&self.rx, &self.tx].into_iter().flatten().for_each(Limiter::disarm);
    }

    fn wake(&mut self, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        self.listen(io.queues[RX].ready() && !self.gone);
        Ok(Outcome { used: false, more: waits(&io.queues[TX], io.memory)? })
    }

    fn reset(&mut self) {
        self.quiet();
        if let Err(error) = self.started(0) {
            tracing::warn!(error = error.chain(), "a TAP's offloads stay as they were");
        }
        // What came for the driver that was is not for the one to come. A TAP holds no more than its queue's length.
        for _ in 0..TAP_QUEUE {
            if self.tap.receive(&mut self.buffer).is_err() {
                break;
            }
        }
        self.buffer.fill(0);
    }

    fn save(&self) -> Result<DeviceState, Error> {
        Ok(DeviceState::Net { mac: self.mac })
    }
}

/// The node has the TAP open too, so that closing it here would not end the watch.
impl Drop for Net {
    fn drop(&mut self) {
        self.listen(false);
    }
}

#[cfg(test)]
mod tests;
