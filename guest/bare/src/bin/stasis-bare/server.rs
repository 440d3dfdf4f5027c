//! vsock's connections, and what is said on them.

use alloc::vec::Vec;
use core::fmt;

use stasis_bare::{
    agent::{Agent, Connection, Turn},
    boot::{self, PowerOn},
};
use stasis_guest_wire::{AGENT_PORT, BOOT_PORT, frame::FrameError};
use virtio_drivers::{
    Error,
    device::socket::{
        ConnectionInfo, DisconnectReason, SocketError, VMADDR_CID_HOST, VirtIOSocket, VsockAddr, VsockEvent,
        VsockEventType,
    },
    transport::mmio::MmioTransport,
};

use crate::{
    apic,
    clock::{self, Clock},
    entry,
    machine::{self, Identity},
};

/// Of the device's receive buffers.
const BUFFER: usize = 4096;
/// What a connection may have sent that is not read yet.
const WINDOW: u32 = 16 * 1024;
/// Ours, of the connection at power-on.
const OWN_PORT: u32 = 1023;
/// Where the VMM leaves entropy for a kernel (`vmm/src/layout.rs`), behind the header of its list.
const SEED: usize = 0x1_f000 + 16;

/// Longest piece that is sent at once.
const PIECE: usize = 16 * 1024;

/// The device. (The driver's own manager of connections does not say whether it has looked at all packets: for one that it keeps to itself it
/// says that there is none.)
type Sockets = VirtIOSocket<Identity, MmioTransport<'static>, BUFFER>;

/// All connections.
pub(crate) struct Server {
    sockets: Sockets,
    agent: Agent,
    open: Vec<Open>,
    clock: Clock,
}

struct Open {
    info: ConnectionInfo,
    connection: Connection,
    /// Bytes that were read since the peer was last told of its window.
    untold: usize,
    /// What waits for the peer's window.
    output: Vec<u8>,
    ends: bool,
    /// When an answer is due, by the counter.
    due: Option<u64>,
}

/// Why this guest ends.
#[derive(Debug)]
pub(crate) enum Fatal {
    NoDevice,
    Device(Error),
    Frame(FrameError),
    HungUp,
}

impl fmt::Display for Fatal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice => write!(f, "this machine has no vsock device"),
            Self::Device(error) => write!(f, "the vsock device: {error}"),
            Self::Frame(error) => write!(f, "the node: {error}"),
            Self::HungUp => write!(f, "the node hung up"),
        }
    }
}

impl From<Error> for Fatal {
    fn from(error: Error) -> Self {
        Self::Device(error)
    }
}

impl From<FrameError> for Fatal {
    fn from(error: FrameError) -> Self {
        Self::Frame(error)
    }
}

impl Server {
    /// Everything before the snapshot.
    pub(crate) fn power_on() -> Result<Self, Fatal> {
        let (transport, line) = machine::find_vsock().ok_or(Fatal::NoDevice)?;
        apic::enable(line);
        let clock = Clock::calibrate();
        let mut sockets = Sockets::new(transport)?;
        // SAFETY: the VMM wrote it there, in memory that is mapped and nobody else's.
        let seed = unsafe { core::ptr::with_exposed_provenance::<[u8; 16]>(SEED).read_volatile() };
        let boot_id = boot::boot_id(seed);
        call_node(&mut sockets, &boot_id)?;
        Ok(Self { sockets, agent: Agent::new(boot_id), open: Vec::with_capacity(256), clock })
    }

    /// Serves until the device fails.
    pub(crate) fn serve(&mut self) -> Fatal {
        loop {
            if let Err(error) = self.turn() {
                return error.into();
            }
        }
    }

    fn turn(&mut self) -> Result<(), Error> {
        entry::forget_interrupts();
        while let Some((event, bytes)) = next(&mut self.sockets)? {
            self.handle(&event, &bytes)?;
        }
        self.answer_what_is_due()?;
        if let Some(tick) = self.open.iter().filter_map(|open| open.due).min() {
            match self.clock.until(tick) {
                0 => return Ok(()),
                nanoseconds => apic::ring_in(nanoseconds),
            }
        }
        entry::halt();
        Ok(())
    }

    fn handle(&mut self, event: &VsockEvent, bytes: &[u8]) -> Result<(), Error> {
        // The node's, of the power-on.
        if event.destination.port != AGENT_PORT {
            return Ok(());
        }
        let known = self.open.iter().position(|open| open.info.dst == event.source);
        if let Some(at) = known {
            self.open[at].info.update_for_event(event);
        }
        match (event.event_type.clone(), known) {
            (VsockEventType::ConnectionRequest, known) => {
                // The host has forgotten a connection of that address: this guest was saved amid it.
                if let Some(at) = known {
                    self.open.swap_remove(at);
                }
                let mut info = ConnectionInfo::new(event.source, AGENT_PORT);
                info.buf_alloc = WINDOW;
                info.update_for_event(event);
                self.sockets.accept(&info)?;
                self.open.push(Open {
                    info,
                    connection: Connection::default(),
                    untold: 0,
                    output: Vec::new(),
                    ends: false,
                    due: None,
                });
            }
            (VsockEventType::Received { .. }, Some(at)) => {
                let open = &mut self.open[at];
                open.info.done_forwarding(bytes.len());
                open.untold += bytes.len();
                if open.untold >= WINDOW as usize / 2 {
                    // Else the host, which may send a window's length unanswered, waits for more room.
                    open.untold = 0;
                    self.sockets.credit_update(&open.info)?;
                }
                let turn = open.connection.received(bytes, &mut self.agent);
                self.take(at, turn)?;
                self.end_stale()?;
            }
            (VsockEventType::CreditUpdate, Some(at)) => self.flush(at)?,
            (VsockEventType::CreditRequest, Some(at)) => self.sockets.credit_update(&self.open[at].info)?,
            (VsockEventType::Disconnected { reason }, Some(at)) => {
                let open = self.open.swap_remove(at);
                if reason == DisconnectReason::Shutdown {
                    self.sockets.force_close(&open.info)?;
                }
            }
            // Of a connection that has ended here.
            _ => {}
        }
        Ok(())
    }

    fn answer_what_is_due(&mut self) -> Result<(), Error> {
        let now = clock::now();
        while let Some(at) = self.open.iter().position(|open| open.due.is_some_and(|due| due <= now)) {
            self.open[at].due = None;
            let turn = self.open[at].connection.due(&mut self.agent);
            self.take(at, turn)?;
        }
        Ok(())
    }

    fn take(&mut self, at: usize, turn: Turn) -> Result<(), Error> {
        let open = &mut self.open[at];
        open.output.extend(turn.output);
        open.ends |= turn.ends;
        if let Some(after) = turn.later {
            open.due = Some(self.clock.after(after));
        }
        self.flush(at)
    }

    /// Sends as much as the peer takes; ends the connection when it is due and all is sent.
    fn flush(&mut self, at: usize) -> Result<(), Error> {
        let open = &mut self.open[at];
        while !open.output.is_empty() {
            let piece = open.output.len().min(PIECE);
            match self.sockets.send(&open.output[..piece], &mut open.info) {
                Ok(()) => drop(open.output.drain(..piece)),
                // It will say when it takes more.
                Err(Error::SocketDeviceError(SocketError::InsufficientBufferSpaceInPeer)) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        if open.ends && open.due.is_none() {
            // Its end is ours too: an answer that it has not read is in the host's buffer already.
            self.sockets.shutdown(&open.info)?;
            self.open.swap_remove(at);
        }
        Ok(())
    }

    /// Connections of an earlier life.
    fn end_stale(&mut self) -> Result<(), Error> {
        while let Some(at) = self.open.iter().position(|open| open.connection.is_stale(&self.agent)) {
            let open = self.open.swap_remove(at);
            self.sockets.force_close(&open.info)?;
        }
        Ok(())
    }
}

/// The next packet, and what it carries; none once all have been looked at.
fn next(sockets: &mut Sockets) -> Result<Option<(VsockEvent, Vec<u8>)>, Error> {
    let mut bytes = Vec::new();
    let event = sockets.poll(|event, body| {
        bytes.extend_from_slice(body);
        Ok(Some(event))
    })?;
    Ok(event.map(|event| (event, bytes)))
}

/// Holds the conversation at power-on to its end.
fn call_node(sockets: &mut Sockets, boot_id: &str) -> Result<(), Fatal> {
    let mut node = ConnectionInfo::new(VsockAddr { cid: VMADDR_CID_HOST, port: BOOT_PORT }, OWN_PORT);
    node.buf_alloc = WINDOW;
    sockets.connect(&node)?;
    let mut power_on = PowerOn::default();
    loop {
        entry::forget_interrupts();
        let Some((event, bytes)) = next(sockets)? else {
            entry::halt();
            continue;
        };
        node.update_for_event(&event);
        match event.event_type {
            VsockEventType::Connected => sockets.send(&boot::hello(boot_id)?, &mut node)?,
            VsockEventType::Received { .. } => {
                node.done_forwarding(bytes.len());
                let output = power_on.received(&bytes)?;
                if !output.is_empty() {
                    sockets.send(&output, &mut node)?;
                }
                if power_on.is_parked() {
                    // Its end may come after the snapshot, and after the first connection to the agent.
                    return Ok(sockets.shutdown(&node)?);
                }
            }
            VsockEventType::CreditRequest => sockets.credit_update(&node)?,
            VsockEventType::Disconnected { .. } => return Err(Fatal::HungUp),
            VsockEventType::ConnectionRequest | VsockEventType::CreditUpdate => {}
        }
    }
}
