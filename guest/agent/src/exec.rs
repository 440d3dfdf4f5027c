//! Commands beside the function, each on a thread of its own.
//!
//! ```text
//!  Exec ─▶ spawn ─▶ running: output as parts ─▶ ended ─▶ what is left of its output ─▶ Exited, Killed
//!                      └─ the node hangs up: its process group is killed
//! ```
//! What a command leaves running in the background is not waited for.

use std::{
    io::{self, PipeReader, PipeWriter, Read, Write},
    os::fd::{AsFd, OwnedFd},
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use stasis_guest_wire::{
    boot::Start,
    exec::{Exec, Part},
};

use crate::{
    child::{Children, read_exit},
    console,
    output::{KEPT, Output},
    poll::{PollFlags, wait},
    socket::{receive, transmit_all},
    start::{self, StartError},
};

/// Commands at a time.
pub const MOST: usize = 16;
/// Most bytes of a part.
const CHUNK: usize = 32 * 1024;
/// Stack of a command's thread: it is not resident before it is used.
const STACK: usize = 256 * 1024;

/// Why a command was not started.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// Too many run.
    #[error("{MOST} commands run already, which is the limit: wait for one to end")]
    Many,
    /// It names no program.
    #[error("the command is empty")]
    Empty,
    /// No command could be made.
    #[error("no command can be made")]
    Start(#[from] StartError),
    /// The system refused.
    #[error("the command cannot be started")]
    System(#[from] io::Error),
}

/// What runs commands, and knows what the function printed.
#[derive(Debug, Clone)]
pub struct Commands {
    start: Arc<Start>,
    children: Arc<Children>,
    output: Arc<Output>,
    running: Arc<AtomicUsize>,
}

impl Commands {
    /// Beside the function that was started so.
    #[must_use]
    pub fn new(start: Start, children: Arc<Children>, output: Arc<Output>) -> Self {
        Self { start: Arc::new(start), children, output, running: Arc::default() }
    }

    /// What the function printed last.
    #[must_use]
    pub fn logs(&self) -> String {
        self.output.text(KEPT)
    }

    /// Starts one. Its output is to go to [`Running::tell`].
    ///
    /// # Errors
    /// [`ExecError`].
    pub fn start(&self, exec: &Exec) -> Result<Running, ExecError> {
        if exec.command.is_empty() {
            return Err(ExecError::Empty);
        }
        let place = Place::take(&self.running).ok_or(ExecError::Many)?;
        Ok(Running::spawn(start::another(&self.start, exec)?, &self.children, &exec.stdin, place)?)
    }
}

/// One of [`MOST`], until dropped.
#[derive(Debug)]
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(running: &Arc<AtomicUsize>) -> Option<Self> {
        let taken = running.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| (now < MOST).then_some(now + 1));
        taken.ok().map(|_| Self(Arc::clone(running)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A command that runs.
#[derive(Debug)]
pub struct Running {
    group: Pid,
    exit: PipeReader,
    /// Standard output and error; none once they have ended.
    outputs: [Option<PipeReader>; 2],
    /// Its standard input, and what it has not read yet.
    input: Option<(PipeWriter, Vec<u8>)>,
    _place: Place,
}

impl Running {
    fn spawn(mut command: Command, children: &Children, input: &str, place: Place) -> io::Result<Self> {
        let (out, out_writer) = io::pipe()?;
        let (err, err_writer) = io::pipe()?;
        command.stdout(out_writer).stderr(err_writer);
        let input = if input.is_empty() {
            command.stdin(Stdio::null());
            None
        } else {
            let (reader, writer) = io::pipe()?;
            command.stdin(reader);
            Some((writer, input.as_bytes().to_vec()))
        };
        for fd in [out.as_fd(), err.as_fd()].into_iter().chain(input.as_ref().map(|(writer, _)| writer.as_fd())) {
            fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        let (group, exit) = children.spawn(&mut command)?;
        // With the command go our copies of its ends of the pipes.
        drop(command);
        Ok(Self { group, exit, outputs: [Some(out), Some(err)], input, _place: place })
    }

    /// Tells the node what comes of it, on a thread of its own.
    pub fn tell(self, node: OwnedFd) {
        let group = self.group;
        let told = thread::Builder::new().name("command".into()).stack_size(STACK).spawn(move || {
            if let Err(error) = self.follow(&node) {
                console::say(format_args!("a command is killed: {error}"));
                kill(group);
            }
        });
        if told.is_err() {
            kill(group);
        }
    }

    fn follow(mut self, node: &OwnedFd) -> io::Result<()> {
        loop {
            let mut polls = vec![(node.as_fd(), PollFlags::POLLIN), (self.exit.as_fd(), PollFlags::POLLIN)];
            polls.extend(self.outputs.iter().flatten().map(|pipe| (pipe.as_fd(), PollFlags::POLLIN)));
            polls.extend(self.input.iter().map(|(pipe, _)| (pipe.as_fd(), PollFlags::POLLOUT)));
            let ready = wait(&polls)?;
            let is_ready = |which: usize| ready.get(which).is_some_and(|flags| !flags.is_empty());
            if is_ready(0) && receive(node, &mut [0; 64])? == Some(0) {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            self.feed();
            self.drain(node)?;
            if is_ready(1) {
                // What it wrote is in the pipes by now.
                self.drain(node)?;
                let end = match read_exit(&mut self.exit)? {
                    Ok(status) => Part::Exited(status),
                    Err(signal) => Part::Killed(signal),
                };
                return say(node, &end);
            }
        }
    }

    /// Writes to its input what that takes; one that reads no more has enough.
    fn feed(&mut self) {
        if let Some((pipe, bytes)) = &mut self.input {
            match pipe.write(bytes) {
                Ok(count) => drop(bytes.drain(..count)),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => return,
                Err(_) => bytes.clear(),
            }
            if bytes.is_empty() {
                self.input = None;
            }
        }
    }

    /// Sends what it has written by now.
    fn drain(&mut self, node: &OwnedFd) -> io::Result<()> {
        for (which, part) in [Part::Stdout as fn(Vec<u8>) -> Part, Part::Stderr].into_iter().enumerate() {
            let Some(output) = self.outputs.get_mut(which) else { continue };
            while let Some(pipe) = output {
                let mut bytes = vec![0; CHUNK];
                match pipe.read(&mut bytes) {
                    Ok(0) => *output = None,
                    Ok(count) => {
                        bytes.truncate(count);
                        say(node, &part(bytes))?;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

fn say(node: &OwnedFd, part: &Part) -> io::Result<()> {
    transmit_all(node, &part.encode().map_err(io::Error::other)?)
}

fn kill(group: Pid) {
    // It may have ended.
    let _ = killpg(group, Signal::SIGKILL);
}

#[cfg(test)]
mod tests;
