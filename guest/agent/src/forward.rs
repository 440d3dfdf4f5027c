//! Bytes between a client (vsock) and the function (TCP), both ways, without a thread of its own.
//!
//! Each direction is a flow:
//!
//! ```text
//!           source ended            all written, sink told
//!  Open ───────────────► Draining ───────────────────────► Done       both Done: the pair is finished
//! ```
//!
//! What is read is written on at once; only what the sink does not take now is held, and until it has gone the source
//! is not read again. Any error of either end tears down both: dropping the pair closes the sockets.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use nix::sys::socket::{Shutdown, shutdown};

use crate::{
    poll::PollFlags,
    socket::{receive, transmit},
};

/// Most bytes that are read at once, and so held per flow.
pub const CHUNK: usize = 64 * 1024;

const GONE: PollFlags = PollFlags::POLLHUP.union(PollFlags::POLLERR);

/// Two connected sockets.
#[derive(Debug)]
pub struct Pair {
    ends: [OwnedFd; 2],
    /// `flows[i]` goes from `ends[i]` to the other.
    flows: [Flow; 2],
}

/// Whether a pair is of further use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// More may come.
    Going,
    /// Both directions have ended in order.
    Finished,
}

#[derive(Debug, Default)]
struct Flow {
    phase: Phase,
    held: Vec<u8>,
    gone: usize,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Phase {
    #[default]
    Open,
    Draining,
    Done,
}

impl Flow {
    fn holds(&self) -> bool {
        self.gone < self.held.len()
    }

    /// Keeps what the sink did not take, for when it does.
    fn hold(&mut self, bytes: &[u8]) {
        self.held.clear();
        self.held.extend_from_slice(bytes);
        self.gone = 0;
    }
}

/// Why an end is polled.
struct Interest {
    reads: bool,
    writes: bool,
    /// It has nothing more to say but may still be told something: its death is worth knowing.
    watches: bool,
}

impl Pair {
    /// Joins two sockets; `early` was already read from the client.
    #[must_use]
    pub fn new(client: OwnedFd, function: OwnedFd, early: Vec<u8>) -> Self {
        let flows = [Flow { held: early, ..Flow::default() }, Flow::default()];
        Self { ends: [client, function], flows }
    }

    /// What to poll the two ends for. An end for which this is `None` must not be polled: it could only report, again
    /// and again, what is known.
    #[must_use]
    pub fn polls(&self) -> [Option<(BorrowedFd<'_>, PollFlags)>; 2] {
        [0, 1].map(|end| {
            let Interest { reads, writes, watches } = self.interest(end);
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::POLLIN, reads);
            flags.set(PollFlags::POLLOUT, writes);
            (reads || writes || watches).then_some((self.ends[end].as_fd(), flags))
        })
    }

    fn interest(&self, end: usize) -> Interest {
        let (out, into) = (&self.flows[end], &self.flows[1 - end]);
        Interest {
            reads: out.phase == Phase::Open && !out.holds(),
            writes: into.holds(),
            watches: out.phase != Phase::Open && into.phase != Phase::Done,
        }
    }

    /// Moves what can be moved, given what the ends reported.
    ///
    /// # Errors
    /// An end failed; the pair is to be dropped.
    pub fn step(&mut self, ready: [PollFlags; 2], buffer: &mut [u8]) -> io::Result<Progress> {
        for (end, ready) in ready.into_iter().enumerate() {
            let Interest { reads, writes, watches } = self.interest(end);
            if writes && ready.intersects(PollFlags::POLLOUT | GONE) {
                self.flush(1 - end)?;
            }
            if reads && ready.intersects(PollFlags::POLLIN | GONE) {
                self.pump(end, buffer)?;
            }
            if watches && !writes && ready.intersects(GONE) {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
        }
        let finished = self.flows.iter().all(|flow| flow.phase == Phase::Done);
        Ok(if finished { Progress::Finished } else { Progress::Going })
    }

    /// Reads once from an end and writes on what the other takes.
    fn pump(&mut self, from: usize, buffer: &mut [u8]) -> io::Result<()> {
        let Some(count) = receive(&self.ends[from], buffer)? else { return Ok(()) };
        if count == 0 {
            self.flows[from].phase = Phase::Draining;
            return self.flush(from);
        }
        let sent = transmit(&self.ends[1 - from], &buffer[..count])?.unwrap_or(0);
        if sent < count {
            self.flows[from].hold(&buffer[sent..count]);
        }
        Ok(())
    }

    /// Writes what a flow holds; after its source's end, and with all written, tells the sink.
    fn flush(&mut self, from: usize) -> io::Result<()> {
        let (flow, sink) = (&mut self.flows[from], &self.ends[1 - from]);
        if flow.holds() {
            flow.gone += transmit(sink, &flow.held[flow.gone..])?.unwrap_or(0);
        }
        if flow.phase == Phase::Draining && !flow.holds() {
            shutdown(sink.as_raw_fd(), Shutdown::Write)?;
            flow.phase = Phase::Done;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
