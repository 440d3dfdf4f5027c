//! virtio-vsock: streams between the guest's vsock ports and Unix sockets of the host.
//!
//! The host connects to a guest port by handing in a socket ([`Vsock::connect`]); when the guest connects to a host port, the
//! far end of a new socket pair waits in [`Vsock::take_accepted`]. [`mux`] keeps the connections and decides what to send,
//! [`connection`] is one of them; this file moves packets through the queues.

mod connection;
mod mux;

use std::{os::unix::net::UnixStream, sync::Arc};

use virtio_queue::{QueueOwnedT, QueueT};
use virtio_vsock::packet::{PKT_HEADER_SIZE, VsockPacket};

use self::mux::Mux;
use super::{Device, DeviceState, Io, Signal, Watch};
use crate::error::Error;

const DEVICE_ID: u32 = 19;
const RX: usize = 0;
const TX: usize = 1;
/// The guest's address; the same in every guest, since none can reach another.
pub(crate) const GUEST_CID: u64 = 3;
/// Longest payload of a packet.
const MAX_PAYLOAD: u32 = 64 * 1024;

/// The device.
pub(crate) struct Vsock {
    config: [u8; 8],
    mux: Mux,
}

impl Vsock {
    /// A device without connections, which has its streams watched by `watch`.
    pub(crate) fn new(watch: Arc<dyn Watch + Send + Sync>) -> Self {
        Self { config: GUEST_CID.to_le_bytes(), mux: Mux::new(watch) }
    }

    /// Connects `stream` to a port of the guest. A refusal closes the stream.
    pub(crate) fn connect(
        &mut self,
        stream: UnixStream,
        port: u32,
        io: &mut Io<'_>,
    ) -> Result<Signal, virtio_queue::Error> {
        self.mux.connect(stream, port);
        self.receive(io)
    }

    /// A watched stream can be read or written.
    pub(crate) fn stream_ready(
        &mut self,
        key: u64,
        readable: bool,
        writable: bool,
        io: &mut Io<'_>,
    ) -> Result<Signal, virtio_queue::Error> {
        self.mux.stream_ready(key, readable, writable);
        self.receive(io)
    }

    /// Connections that the guest has made since the last call: port, and the far end.
    pub(crate) fn take_accepted(&mut self) -> Vec<(u32, UnixStream)> {
        self.mux.take_accepted()
    }

    /// Fills the guest's receive queue with what there is for it.
    fn receive(&mut self, io: &mut Io<'_>) -> Result<Signal, virtio_queue::Error> {
        let memory = io.memory;
        let queue = &mut io.queues[RX];
        if !queue.ready() {
            return Ok(Signal::None);
        }
        let mut used = false;
        while self.mux.has_output() {
            let Some(mut chain) = queue.pop_descriptor_chain(memory) else { break };
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
        Ok(if used && queue.needs_notification(memory)? { Signal::Used } else { Signal::None })
    }

    /// Takes what the guest sends, as long as the answers to it do not pile up.
    fn transmit(&mut self, io: &mut Io<'_>) -> Result<Signal, virtio_queue::Error> {
        let memory = io.memory;
        let queue = &mut io.queues[TX];
        let mut used = false;
        while self.mux.accepts_input() {
            let Some(mut chain) = queue.pop_descriptor_chain(memory) else { break };
            let head = chain.head_index();
            match VsockPacket::from_tx_virtq_chain(memory, &mut chain, MAX_PAYLOAD) {
                Ok(packet) => self.mux.take(&packet),
                Err(error) => tracing::debug!(%error, "the guest's vsock packet is unusable"),
            }
            queue.add_used(memory, head, 0)?;
            used = true;
        }
        Ok(if used && queue.needs_notification(memory)? { Signal::Used } else { Signal::None })
    }

    /// Both directions, until neither moves: taking input makes output, and delivered output lets input in again.
    fn exchange(&mut self, io: &mut Io<'_>) -> Result<Signal, virtio_queue::Error> {
        let mut signal = Signal::None;
        loop {
            let blocked = !self.mux.accepts_input();
            for moved in [self.transmit(io)?, self.receive(io)?] {
                if moved == Signal::Used {
                    signal = Signal::Used;
                }
            }
            if !(blocked && self.mux.accepts_input()) {
                return Ok(signal);
            }
        }
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
        3
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn notified(&mut self, queue: usize, io: &mut Io<'_>) -> Result<Signal, virtio_queue::Error> {
        match queue {
            RX | TX => {
                let mut signal = Signal::None;
                loop {
                    io.queues[queue].disable_notification(io.memory)?;
                    if self.exchange(io)? == Signal::Used {
                        signal = Signal::Used;
                    }
                    // New transmissions since the queue was drained; receive buffers need no second look, the next output does.
                    let more = io.queues[queue].enable_notification(io.memory)?;
                    if !(more && queue == TX && self.mux.accepts_input()) {
                        return Ok(signal);
                    }
                }
            }
            _ => Ok(Signal::None),
        }
    }

    fn reset(&mut self) {
        self.mux.reset();
    }

    fn save(&self) -> Result<DeviceState, Error> {
        if self.mux.is_idle() {
            Ok(DeviceState::Vsock)
        } else {
            Err(Error::Refused("a snapshot may hold no open vsock connection"))
        }
    }

    fn as_vsock(&mut self) -> Option<&mut Vsock> {
        Some(self)
    }
}
