//! vsock's connections, and what is said on them.

use alloc::vec::Vec;
use core::fmt;

use stasis_bare::{
    agent::{Agent, Connection, Turn},
    boot::{self, PowerOn},
    packet::{Flow, Header, Op},
};
use stasis_guest_wire::{AGENT_PORT, BOOT_PORT, frame::FrameError};
use virtio_drivers::Error;

use crate::{
    apic,
    clock::{self, Clock},
    entry, machine,
    sockets::{PIECE, Sockets},
};

/// What a connection may have sent that is not read yet.
const WINDOW: u32 = 16 * 1024;
/// Ours, of the connection at power-on.
const OWN_PORT: u32 = 1023;
/// Where the VMM leaves entropy for a kernel (`vmm/src/layout.rs`), behind the header of its list.
const SEED: usize = 0x1_f000 + 16;

/// All connections.
pub(crate) struct Server {
    sockets: Sockets,
    agent: Agent,
    open: Vec<Open>,
    clock: Clock,
}

struct Open {
    flow: Flow,
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

    /// Serves for ever.
    pub(crate) fn serve(&mut self) -> ! {
        loop {
            self.turn();
        }
    }

    fn turn(&mut self) {
        entry::forget_interrupts();
        while let Some((header, bytes)) = self.sockets.next() {
            self.handle(&header, &bytes);
        }
        self.answer_what_is_due();
        self.sockets.tell();
        if let Some(tick) = self.open.iter().filter_map(|open| open.due).min() {
            match self.clock.until(tick) {
                0 => return,
                nanoseconds => apic::ring_in(nanoseconds),
            }
        }
        if self.sockets.listen() {
            entry::halt();
        }
    }

    fn handle(&mut self, header: &Header, bytes: &[u8]) {
        let (peer, own) = (header.source.1, header.destination.1);
        // The node's, of the power-on.
        if own != AGENT_PORT {
            return;
        }
        let known = self.open.iter().position(|open| open.flow.peer == peer);
        if let Some(at) = known {
            self.open[at].flow.heard(header);
        }
        match (header.op, known) {
            (Some(Op::Request), known) => {
                // The host has forgotten a connection of that address: this guest was saved amid it.
                if let Some(at) = known {
                    self.open.swap_remove(at);
                }
                let mut flow = Flow::new(peer, own, WINDOW);
                flow.heard(header);
                self.sockets.say(Op::Response, &mut flow);
                self.open.push(Open {
                    flow,
                    connection: Connection::default(),
                    untold: 0,
                    output: Vec::new(),
                    ends: false,
                    due: None,
                });
            }
            (Some(Op::Data), Some(at)) => {
                let open = &mut self.open[at];
                open.flow.took(header.length);
                open.untold += bytes.len();
                if open.untold >= WINDOW as usize / 2 {
                    // Else the host, which may send a window's length unanswered, waits for more room.
                    open.untold = 0;
                    self.sockets.say(Op::CreditUpdate, &mut open.flow);
                }
                let turn = open.connection.received(bytes, &mut self.agent);
                self.take(at, turn);
                self.end_stale();
            }
            (Some(Op::CreditUpdate), Some(at)) => self.flush(at),
            (Some(Op::CreditRequest), Some(at)) => self.sockets.say(Op::CreditUpdate, &mut self.open[at].flow),
            (Some(Op::Reset), Some(at)) => drop(self.open.swap_remove(at)),
            (Some(Op::Shutdown), Some(at)) => {
                let mut open = self.open.swap_remove(at);
                self.sockets.say(Op::Reset, &mut open.flow);
            }
            // Of a connection that has ended here.
            _ => {}
        }
    }

    fn answer_what_is_due(&mut self) {
        let now = clock::now();
        while let Some(at) = self.open.iter().position(|open| open.due.is_some_and(|due| due <= now)) {
            self.open[at].due = None;
            let turn = self.open[at].connection.due(&mut self.agent);
            self.take(at, turn);
        }
    }

    fn take(&mut self, at: usize, turn: Turn) {
        let open = &mut self.open[at];
        open.output.extend(turn.output);
        open.ends |= turn.ends;
        if let Some(after) = turn.later {
            open.due = Some(self.clock.after(after));
        }
        self.flush(at);
    }

    /// Sends as much as the peer takes; ends the connection when it is due and all is sent.
    fn flush(&mut self, at: usize) {
        let open = &mut self.open[at];
        while !open.output.is_empty() {
            let piece = open.output.len().min(PIECE).min(open.flow.peer_has_room_for() as usize);
            if piece == 0 {
                // It will say when it takes more: this is the question.
                return self.sockets.say(Op::CreditRequest, &mut open.flow);
            }
            self.sockets.send_bytes(&open.output[..piece], &mut open.flow);
            open.output.drain(..piece);
        }
        if open.ends && open.due.is_none() {
            // Its end is ours too: an answer that it has not read is in the host's buffer already.
            self.sockets.say(Op::Shutdown, &mut open.flow);
            self.open.swap_remove(at);
        }
    }

    /// Connections of an earlier life.
    fn end_stale(&mut self) {
        while let Some(at) = self.open.iter().position(|open| open.connection.is_stale(&self.agent)) {
            let mut open = self.open.swap_remove(at);
            self.sockets.say(Op::Reset, &mut open.flow);
        }
    }
}

/// Holds the conversation at power-on to its end.
fn call_node(sockets: &mut Sockets, boot_id: &str) -> Result<(), Fatal> {
    let mut node = Flow::new(BOOT_PORT, OWN_PORT, WINDOW);
    sockets.say(Op::Request, &mut node);
    let mut power_on = PowerOn::default();
    loop {
        entry::forget_interrupts();
        let Some((header, bytes)) = sockets.next() else {
            sockets.tell();
            if sockets.listen() {
                entry::halt();
            }
            continue;
        };
        node.heard(&header);
        match header.op {
            Some(Op::Response) => sockets.send_bytes(&boot::hello(boot_id)?, &mut node),
            Some(Op::Data) => {
                node.took(header.length);
                let output = power_on.received(&bytes)?;
                if !output.is_empty() {
                    sockets.send_bytes(&output, &mut node);
                }
                if power_on.is_parked() {
                    // Its end may come after the snapshot, and after the first connection to the agent.
                    sockets.say(Op::Shutdown, &mut node);
                    sockets.tell();
                    return Ok(());
                }
            }
            Some(Op::CreditRequest) => sockets.say(Op::CreditUpdate, &mut node),
            Some(Op::Reset | Op::Shutdown) => return Err(Fatal::HungUp),
            Some(Op::Request | Op::CreditUpdate) | None => {}
        }
    }
}
