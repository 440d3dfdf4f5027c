//! virtio-vsock: streams between the guest's vsock ports and Unix sockets of the host.
//!
//! The host connects to a guest port by handing in a socket ([`Vsock::connect`]); when the guest connects to a host port, the
//! far end of a new socket pair waits in [`Vsock::take_accepted`]. [`mux`] keeps the connections and decides what to send,
//! [`connection`] is one of them; this file moves packets through the queues.

mod connection;
#[cfg(test)]
mod guest;
mod mux;

use std::{io::Write, os::unix::net::UnixStream, sync::Arc};

use virtio_queue::{QueueOwnedT, QueueT, Writer};
use virtio_vsock::packet::{PKT_HEADER_SIZE, VsockPacket};

use self::mux::Mux;
use super::{Device, DeviceState, Events, Io, Outcome, Watch, pop};
use crate::error::Error;

const DEVICE_ID: u32 = 19;
/// Receive, transmit, events.
pub(crate) const QUEUES: usize = 3;
const RX: usize = 0;
const TX: usize = 1;
const EVENTS: usize = 2;
/// `VIRTIO_VSOCK_EVENT_TRANSPORT_RESET` (virtio 1.2, section 5.10.6.7): all connections are gone.
const TRANSPORT_RESET: u32 = 0;
/// The guest's address; the same in every guest, since none can reach another.
pub(crate) const GUEST_CID: u64 = 3;
/// Longest payload of a packet.
const MAX_PAYLOAD: u32 = 64 * 1024;
/// Packets moved in one turn of the event loop, both ways together.
const PACKETS_PER_TURN: u32 = 256;

/// The device.
pub(crate) struct Vsock {
    config: [u8; 8],
    mux: Mux,
    /// The guest must hear that its connections are gone.
    reset_due: bool,
}

impl Vsock {
    /// A device without connections, which has its streams watched by `watch`.
    pub(crate) fn new(watch: Arc<dyn Watch + Send + Sync>) -> Self {
        Self { config: GUEST_CID.to_le_bytes(), mux: Mux::new(watch), reset_due: false }
    }

    /// Connects `stream` to a port of the guest. A refusal closes the stream.
    pub(crate) fn connect(
        &mut self,
        stream: UnixStream,
        port: u32,
        io: &mut Io<'_>,
    ) -> Result<Outcome, virtio_queue::Error> {
        self.mux.connect(stream, port);
        self.exchange(io)
    }

    /// What was watched for on a stream has happened.
    pub(crate) fn stream_ready(
        &mut self,
        key: u64,
        events: Events,
        io: &mut Io<'_>,
    ) -> Result<Outcome, virtio_queue::Error> {
        self.mux.stream_ready(key, events);
        self.exchange(io)
    }

    /// Connections that the guest has made since the last call: port, and the far end.
    pub(crate) fn take_accepted(&mut self) -> Vec<(u32, UnixStream)> {
        self.mux.take_accepted()
    }

    /// Fills the guest's receive queue with what there is for it. Returns whether the guest must hear of it.
    fn receive(&mut self, io: &mut Io<'_>, turn: &mut Turn) -> Result<bool, virtio_queue::Error> {
        let memory = io.memory;
        let queue = &mut io.queues[RX];
        if !queue.ready() {
            return Ok(false);
        }
        let mut used = false;
        while self.mux.has_output() && turn.take() {
            let Some(mut chain) = pop(queue, memory)? else {
                // Output waits for buffers: only now does the guest have to tell of new ones.
                if queue.enable_notification(memory)? {
                    continue;
                }
                break;
            };
            let head = chain.head_index();
            let length = match VsockPacket::from_rx_virtq_chain(memory, &mut chain, MAX_PAYLOAD) {
                Ok(mut packet) => match self.mux.fill(&mut packet) {
                    Some(payload) => u32::try_from(PKT_HEADER_SIZE + payload).unwrap_or(u32::MAX),
                    None => {
                        queue.go_to_previous_position();
                        break;
                    }
                },
                Err(error) => {
                    tracing::debug!(%error, "the guest's vsock receive buffer is unusable");
                    0
                }
            };
            queue.add_used(memory, head, length)?;
            used = true;
        }
        Ok(used && queue.needs_notification(memory)?)
    }

    /// Takes what the guest sends, as long as the answers to it do not pile up. Returns whether the guest must hear of it.
    fn transmit(&mut self, io: &mut Io<'_>, turn: &mut Turn) -> Result<bool, virtio_queue::Error> {
        let memory = io.memory;
        let queue = &mut io.queues[TX];
        if !queue.ready() {
            return Ok(false);
        }
        let mut used = false;
        while self.mux.accepts_input() && turn.take() {
            let Some(mut chain) = pop(queue, memory)? else {
                if queue.enable_notification(memory)? {
                    continue;
                }
                break;
            };
            let head = chain.head_index();
            match VsockPacket::from_tx_virtq_chain(memory, &mut chain, MAX_PAYLOAD) {
                Ok(packet) => self.mux.take(&packet),
                Err(error) => tracing::debug!(%error, "the guest's vsock packet is unusable"),
            }
            queue.add_used(memory, head, 0)?;
            used = true;
        }
        Ok(used && queue.needs_notification(memory)?)
    }

    /// Tells the guest what it must hear, as soon as it has a buffer for it.
    fn announce(&mut self, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        let memory = io.memory;
        let queue = &mut io.queues[EVENTS];
        while self.reset_due {
            let Some(chain) = pop(queue, memory)? else {
                if queue.ready() && queue.enable_notification(memory)? {
                    continue;
                }
                break;
            };
            let head = chain.head_index();
            let written = Writer::new(memory, chain).map(|mut writer| writer.write_all(&TRANSPORT_RESET.to_le_bytes()));
            let length = match written {
                Ok(Ok(())) => 4,
                _ => 0,
            };
            self.reset_due = length == 0;
            queue.add_used(memory, head, length)?;
            if length > 0 {
                return Ok(Outcome { used: queue.needs_notification(memory)?, more: false });
            }
        }
        Ok(Outcome::default())
    }

    /// Both directions, until neither moves: taking input makes output, and delivered output lets input in again.
    fn exchange(&mut self, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        let mut turn = Turn(PACKETS_PER_TURN);
        let mut used = false;
        loop {
            used |= self.transmit(io, &mut turn)?;
            let blocked = !self.mux.accepts_input();
            used |= self.receive(io, &mut turn)?;
            if !blocked || !self.mux.accepts_input() || turn.is_over() {
                return Ok(Outcome { used, more: turn.is_over() });
            }
        }
    }
}

/// Steps left in this turn of the event loop.
struct Turn(u32);

impl Turn {
    fn take(&mut self) -> bool {
        self.0.checked_sub(1).map(|left| self.0 = left).is_some()
    }

    fn is_over(&self) -> bool {
        self.0 == 0
    }
}

impl Device for Vsock {
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
        &self.config
    }

    fn notified(&mut self, queue: usize, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        if queue == EVENTS { self.announce(io) } else { self.exchange(io) }
    }

    fn reset(&mut self) {
        self.mux.reset();
        self.reset_due = false;
    }

    fn wake(&mut self, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        self.announce(io)
    }

    fn save(&self) -> Result<DeviceState, Error> {
        match self.save_cut()? {
            DeviceState::VsockCut => Err(Error::Refused("a snapshot may hold no open vsock connection")),
            idle => Ok(idle),
        }
    }

    fn save_cut(&self) -> Result<DeviceState, Error> {
        let idle = self.mux.is_idle() && !self.reset_due;
        Ok(if idle { DeviceState::Vsock } else { DeviceState::VsockCut })
    }

    fn restore(&mut self, saved: &DeviceState) -> Result<(), Error> {
        self.reset_due = match saved {
            DeviceState::Vsock => false,
            DeviceState::VsockCut => true,
            other => return Err(Error::Snapshot(format!("a device is vsock, the snapshot has {other:?}"))),
        };
        Ok(())
    }

    fn as_vsock(&mut self) -> Option<&mut Vsock> {
        Some(self)
    }
}

#[cfg(test)]
mod tests;
