//! Every connection after the snapshot, on one thread.
//!
//! ```text
//! [waits at the wake page, until an order or a knock]
//!
//!  accept         first frame          Wake proved | Forward while open        connected
//!  ──────► Greeting ────────► gate ─────────────────────────────────► Dialing ──────────► Forwarding ──► dropped
//!                              ├── Refused, Logs ──► dropped            └── not listening ──► dropped
//!                              └── Executing ──► a thread of its own (`exec`)
//! ```
//!
//! One thread, because a switch between two costs an interpreted kernel more than the few descriptors that are polled
//! in vain. Connections of an earlier generation are never moved again.

use std::{
    io, mem,
    os::fd::{AsFd, OwnedFd},
    os::unix::net::UnixListener,
    time::Instant,
};

use stasis_guest_wire::{
    exec::Exec,
    frame,
    wake::{FromAgent, FromNode, Wake},
};
use vsock::VsockListener;

use crate::{
    console,
    dial::{Dialer, Dialing},
    exec::Commands,
    forward::{CHUNK, Pair, Progress},
    gate::{Effects, Gate},
    greeting::{Greeting, Heard},
    page::Page,
    poll::{PollFlags, wait, wait_until},
    socket::transmit_all,
};

/// A listening socket that does not block.
pub trait Listener: AsFd {
    /// The next connection.
    ///
    /// # Errors
    /// None is there, or it failed.
    fn next(&self) -> io::Result<OwnedFd>;
}

impl Listener for VsockListener {
    fn next(&self) -> io::Result<OwnedFd> {
        self.accept().map(|(stream, _)| stream.into())
    }
}

impl Listener for UnixListener {
    fn next(&self) -> io::Result<OwnedFd> {
        self.accept().map(|(stream, _)| stream.into())
    }
}

/// The server and all of its connections.
pub struct Server<L, E> {
    listener: L,
    gate: Gate<E>,
    dialer: Dialer,
    /// Told when the function does not accept.
    deaf: Box<dyn FnMut(&io::Error) + Send>,
    connections: Vec<Connection>,
    buffer: Vec<u8>,
    commands: Option<Commands>,
    page: Option<Page>,
}

enum Connection {
    Greeting(Greeting),
    Dialing { life: u64, dialing: Dialing },
    Forwarding { life: u64, pair: Pair },
}

impl Connection {
    fn life(&self) -> Option<u64> {
        match self {
            Self::Greeting(_) => None,
            Self::Dialing { life, .. } | Self::Forwarding { life, .. } => Some(*life),
        }
    }

    fn polls(&self) -> [Option<(std::os::fd::BorrowedFd<'_>, PollFlags)>; 2] {
        match self {
            Self::Greeting(greeting) => [Some((greeting.fd(), PollFlags::POLLIN)), None],
            Self::Dialing { dialing, .. } => [Some((dialing.fd(), PollFlags::POLLOUT)), None],
            Self::Forwarding { pair, .. } => pair.polls(),
        }
    }
}

impl<L: Listener, E: Effects> Server<L, E> {
    /// One without connections. `listener` must not block.
    pub fn new(listener: L, gate: Gate<E>, dialer: Dialer, deaf: impl FnMut(&io::Error) + Send + 'static) -> Self {
        let (connections, buffer) = (Vec::with_capacity(64), vec![0; CHUNK]);
        Self { listener, gate, dialer, deaf: Box::new(deaf), connections, buffer, commands: None, page: None }
    }

    /// One that also runs commands.
    #[must_use]
    pub fn with_commands(self, commands: Commands) -> Self {
        Self { commands: Some(commands), ..self }
    }

    /// One that first waits for an order at `page`.
    #[must_use]
    pub fn with_page(self, page: Page) -> Self {
        Self { page: Some(page), ..self }
    }

    /// Serves until something fails that is not a connection's own.
    pub fn run(mut self) -> io::Error {
        if let Some(page) = self.page.take() {
            self.parked(&page);
        }
        loop {
            if let Err(error) = self.turn() {
                return error;
            }
        }
    }

    /// Waits at the page until an order comes there, or somebody to the door: then that is the next turn's.
    fn parked(&mut self, page: &Page) {
        let knocks = || {
            let door = [(self.listener.as_fd(), PollFlags::POLLIN)];
            // A door that cannot be looked at is the next turn's too.
            wait_until(&door, Some(Instant::now())).map_or(true, |flags| flags.iter().any(|flags| !flags.is_empty()))
        };
        let Some(order) = page.order(knocks) else { return };
        let answer = match serde_json::from_str::<Wake>(&order) {
            Ok(wake) => self.gate.wake(&wake),
            Err(error) => FromAgent::Refused { step: None, reason: error.to_string() },
        };
        let told = match serde_json::to_string(&answer) {
            Ok(text) => page.answer(&text),
            Err(error) => Err(error.into()),
        };
        // After the answer: the console is slow.
        tell_refusal(&answer);
        if let Err(error) = told {
            // It is too long: what the node takes from the page is no answer, and it ends this VM.
            let _ = page.answer("");
            console::say(format_args!("no answer to the order: {error}"));
        }
    }

    fn turn(&mut self) -> io::Result<()> {
        let (knocks, ready) = self.wait()?;
        for (connection, ready) in mem::take(&mut self.connections).into_iter().zip(ready) {
            if connection.life().is_some_and(|life| self.gate.generation() != Some(life)) {
                continue;
            }
            let idle = ready.iter().all(|flags| flags.is_empty());
            let next = if idle { Some(connection) } else { self.step(connection, ready) };
            self.connections.extend(next);
        }
        if knocks {
            match self.listener.next() {
                Ok(stream) => self.connections.push(Connection::Greeting(Greeting::new(stream))),
                // It was reset before it was accepted.
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits; whether a new connection is there, and what each of ours reports.
    fn wait(&self) -> io::Result<(bool, Vec<[PollFlags; 2]>)> {
        let polls: Vec<_> = self.connections.iter().map(Connection::polls).collect();
        let mut fds = Vec::with_capacity(1 + 2 * polls.len());
        fds.push((self.listener.as_fd(), PollFlags::POLLIN));
        fds.extend(polls.iter().flatten().flatten());
        let mut reported = wait(&fds)?.into_iter();
        let knocks = reported.next().is_some_and(|flags| !flags.is_empty());
        let mut take = |poll: Option<_>| poll.and_then(|_| reported.next()).unwrap_or(PollFlags::empty());
        Ok((knocks, polls.into_iter().map(|ends| ends.map(&mut take)).collect()))
    }

    /// Takes a connection one step further; `None` if it has ended.
    fn step(&mut self, connection: Connection, ready: [PollFlags; 2]) -> Option<Connection> {
        match connection {
            Connection::Greeting(greeting) => match greeting.step(&mut self.buffer).ok()? {
                Heard::Part(greeting) => Some(Connection::Greeting(greeting)),
                Heard::Whole { stream, message, early } => self.answer(stream, &message, early),
                Heard::Garbage { stream, error } => {
                    let reason = console::chain(&error);
                    console::say(format_args!("refused: {reason}"));
                    let refused = FromAgent::Refused { step: None, reason };
                    say(&stream, &refused).ok()?;
                    None
                }
            },
            Connection::Dialing { life, dialing } => match dialing.finish() {
                Ok(pair) => Some(Connection::Forwarding { life, pair }),
                Err(error) => {
                    (self.deaf)(&error);
                    None
                }
            },
            Connection::Forwarding { life, mut pair } => match pair.step(ready, &mut self.buffer).ok()? {
                Progress::Going => Some(Connection::Forwarding { life, pair }),
                Progress::Finished => None,
            },
        }
    }

    fn answer(&mut self, stream: OwnedFd, message: &FromNode, early: Vec<u8>) -> Option<Connection> {
        let answer = match message {
            FromNode::Wake(wake) => self.gate.wake(wake),
            FromNode::Forward | FromNode::Pass => self.gate.forward(),
            FromNode::Exec(exec) => return self.execute(stream, exec),
            FromNode::Logs => self.logs(),
        };
        let told = match message {
            FromNode::Pass => Ok(()),
            // The node has the answer before the function is called: the two then work at the same time.
            _ => say(&stream, &answer),
        };
        tell_refusal(&answer);
        told.ok()?;
        let life = match answer {
            FromAgent::Awake(_) | FromAgent::Forwarding => self.gate.generation()?,
            FromAgent::Refused { .. } | FromAgent::Logs { .. } | FromAgent::Executing | FromAgent::NoCommands => {
                return None;
            }
        };
        match self.dialer.dial(stream, early) {
            Ok(dialing) => Some(Connection::Dialing { life, dialing }),
            Err(error) => {
                (self.deaf)(&error);
                None
            }
        }
    }

    /// Starts a command, whose thread takes the connection.
    fn execute(&self, stream: OwnedFd, exec: &Exec) -> Option<Connection> {
        let refused = |reason| FromAgent::Refused { step: None, reason };
        let started = match (self.gate.forward(), &self.commands) {
            (FromAgent::Forwarding, Some(commands)) => {
                commands.start(exec).map_err(|error| refused(console::chain(&error)))
            }
            (FromAgent::Forwarding, None) => Err(FromAgent::NoCommands),
            (closed, _) => Err(closed),
        };
        match started {
            Ok(running) => {
                // Should the node be gone, the command is killed when its thread sees that.
                let _ = say(&stream, &FromAgent::Executing);
                running.tell(stream);
            }
            Err(refusal) => {
                // The node may be gone.
                let _ = say(&stream, &refusal);
            }
        }
        None
    }

    fn logs(&self) -> FromAgent {
        FromAgent::Logs { output: self.commands.as_ref().map(Commands::logs).unwrap_or_default() }
    }
}

fn tell_refusal(answer: &FromAgent) {
    if let FromAgent::Refused { step, reason } = answer {
        console::say(format_args!("refused ({step:?}): {reason}"));
    }
}

/// Sends one frame in one piece.
fn say(stream: &OwnedFd, answer: &FromAgent) -> io::Result<()> {
    transmit_all(stream, &frame::encode(answer).map_err(io::Error::other)?)
}

#[cfg(test)]
mod tests;
