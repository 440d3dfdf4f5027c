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
    device::socket::{SocketError, VirtIOSocket, VsockAddr, VsockConnectionManager, VsockEvent, VsockEventType},
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
const HOST: u64 = 2;
/// Ours, of the connection at power-on.
const OWN_PORT: u32 = 1023;
/// Where the VMM leaves entropy for a kernel (`vmm/src/layout.rs`), behind the header of its list.
const SEED: usize = 0x1_f000 + 16;

type Sockets = VsockConnectionManager<Identity, MmioTransport<'static>, BUFFER>;

/// All connections.
pub(crate) struct Server {
    sockets: Sockets,
    agent: Agent,
    open: Vec<Open>,
    clock: Clock,
}

struct Open {
    peer: VsockAddr,
    connection: Connection,
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
        let mut sockets = Sockets::new_with_capacity(VirtIOSocket::new(transport)?, WINDOW);
        sockets.listen(AGENT_PORT);
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
        while let Some(event) = self.sockets.poll()? {
            self.handle(&event)?;
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

    fn handle(&mut self, event: &VsockEvent) -> Result<(), Error> {
        let peer = event.source;
        match event.event_type {
            VsockEventType::ConnectionRequest => {
                let connection = Connection::default();
                self.open.push(Open { peer, connection, output: Vec::new(), ends: false, due: None });
            }
            VsockEventType::Received { length } => {
                let mut bytes = alloc::vec![0; length];
                let read = self.sockets.recv(peer, AGENT_PORT, &mut bytes)?;
                bytes.truncate(read);
                if let Some(at) = self.find(peer) {
                    let turn = self.open[at].connection.received(&bytes, &mut self.agent);
                    self.take(at, turn)?;
                    self.end_stale()?;
                }
            }
            VsockEventType::CreditUpdate => {
                if let Some(at) = self.find(peer) {
                    self.flush(at)?;
                }
            }
            VsockEventType::Disconnected { .. } => self.open.retain(|open| open.peer != peer),
            VsockEventType::Connected | VsockEventType::CreditRequest => {}
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
        if !open.output.is_empty() {
            match self.sockets.send(open.peer, AGENT_PORT, &open.output) {
                Ok(()) => open.output.clear(),
                // It will say when it takes more.
                Err(Error::SocketDeviceError(SocketError::InsufficientBufferSpaceInPeer)) => return Ok(()),
                Err(Error::SocketDeviceError(SocketError::NotConnected)) => open.ends = true,
                Err(error) => return Err(error),
            }
        }
        if open.ends && open.due.is_none() {
            // Its end is ours too: an answer that it has not read is in the host's buffer already.
            let _ = self.sockets.shutdown(open.peer, AGENT_PORT);
            self.open.swap_remove(at);
        }
        Ok(())
    }

    /// Connections of an earlier life.
    fn end_stale(&mut self) -> Result<(), Error> {
        while let Some(at) = self.open.iter().position(|open| open.connection.is_stale(&self.agent)) {
            let open = self.open.swap_remove(at);
            match self.sockets.force_close(open.peer, AGENT_PORT) {
                Ok(()) | Err(Error::SocketDeviceError(SocketError::NotConnected)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn find(&self, peer: VsockAddr) -> Option<usize> {
        self.open.iter().position(|open| open.peer == peer)
    }
}

/// Holds the conversation at power-on to its end.
fn call_node(sockets: &mut Sockets, boot_id: &str) -> Result<(), Fatal> {
    let node = VsockAddr { cid: HOST, port: BOOT_PORT };
    sockets.connect(node, OWN_PORT)?;
    let mut power_on = PowerOn::default();
    loop {
        let Some(event) = sockets.poll()? else {
            entry::halt();
            continue;
        };
        match event.event_type {
            VsockEventType::Connected => sockets.send(node, OWN_PORT, &boot::hello(boot_id)?)?,
            VsockEventType::Received { length } => {
                let mut bytes = alloc::vec![0; length];
                let read = sockets.recv(node, OWN_PORT, &mut bytes)?;
                let output = power_on.received(&bytes[..read])?;
                if !output.is_empty() {
                    sockets.send(node, OWN_PORT, &output)?;
                }
                if power_on.is_parked() {
                    sockets.shutdown(node, OWN_PORT)?;
                }
            }
            VsockEventType::Disconnected { .. } if power_on.is_parked() => return Ok(()),
            VsockEventType::Disconnected { .. } => return Err(Fatal::HungUp),
            _ => {}
        }
    }
}
