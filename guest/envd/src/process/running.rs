//! A process, and the task that follows it.

use std::{io, os::fd::OwnedFd, sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use rustix::{io::ioctl_fionread, process::Signal};
use tokio::{
    process::Child,
    sync::{Mutex, watch},
    time::timeout,
};

use crate::{
    connect::{self, Code, RpcError},
    fd::{self, Fd},
    process::{
        child::{self, Io},
        message::{Config, Data, End, Event, Said},
        output::{Hub, Subscriber},
        signal, status,
    },
};

/// Most bytes of one event.
const CHUNK: usize = 32 * 1024;
/// How long a terminal may take to hang up after its leader's end, if a process in the background got hold of it. No event tells that it will not.
const HANG_UP: Duration = Duration::from_secs(1);

/// A process that runs, or has ended lately.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) config: Config,
    pub(super) tag: Option<String>,
    hub: Hub,
    end: watch::Sender<Option<End>>,
    input: Input,
}

#[derive(Debug)]
enum Input {
    Pipe(Mutex<Option<Fd>>),
    Pty { terminal: Arc<Fd>, turn: Mutex<()> },
}

/// One output that is read.
#[derive(Debug)]
struct Source {
    fd: Arc<Fd>,
    open: bool,
    data: fn(String) -> Data,
    buffer: Vec<u8>,
}

impl Process {
    /// Of a child just started; the outputs are for [`Process::follow`].
    pub(super) fn new(pid: u32, config: Config, tag: Option<String>, io: Io) -> (Self, Follow) {
        let (input, sources) = match io {
            Io::Pipes { stdin, stdout, stderr } => {
                let sources =
                    vec![Source::new(Arc::new(stdout), Data::Stdout), Source::new(Arc::new(stderr), Data::Stderr)];
                (Input::Pipe(Mutex::new(stdin)), sources)
            }
            Io::Pty(terminal) => {
                let terminal = Arc::new(terminal);
                let sources = vec![Source::new(Arc::clone(&terminal), Data::Pty)];
                (Input::Pty { terminal, turn: Mutex::default() }, sources)
            }
        };
        (Self { pid, config, tag, hub: Hub::default(), end: watch::channel(None).0, input }, Follow(sources))
    }

    pub(super) fn subscribe(&self) -> Subscriber {
        self.hub.subscribe()
    }

    /// How it ended, if it has.
    pub(super) fn ended(&self) -> Option<End> {
        self.end.borrow().clone()
    }

    /// Writes to its input, and waits until that has taken all.
    pub(super) async fn write_stdin(&self, bytes: &[u8]) -> Result<(), RpcError> {
        let Input::Pipe(stdin) = &self.input else {
            return Err(precondition("tty assigned to process — input should be written to the pty, not the stdin"));
        };
        let stdin = stdin.lock().await;
        let Some(stdin) = stdin.as_ref() else { return Err(precondition("stdin not enabled or closed")) };
        self.write(stdin, bytes, "stdin").await
    }

    /// Types at its terminal.
    pub(super) async fn write_pty(&self, bytes: &[u8]) -> Result<(), RpcError> {
        let Input::Pty { terminal, turn } = &self.input else {
            return Err(precondition(
                "tty not assigned to process — input should be written to the stdin, not the tty",
            ));
        };
        let _turn = turn.lock().await;
        self.write(terminal, bytes, "tty").await
    }

    async fn write(&self, fd: &Fd, bytes: &[u8], what: &str) -> Result<(), RpcError> {
        let mut end = self.end.subscribe();
        let written = tokio::select! {
            written = fd::send_all(fd, bytes) => written,
            // The sender is ours: it is not gone.
            _ = end.wait_for(Option::is_some) => Err(io::ErrorKind::BrokenPipe.into()),
        };
        written.map_err(|error| precondition(format!("error writing to {what} of process '{}': {error}", self.pid)))
    }

    /// Nothing more comes to its input. Closed already is as good.
    pub(super) async fn close_stdin(&self) -> Result<(), RpcError> {
        let Input::Pipe(stdin) = &self.input else {
            return Err(precondition("cannot close stdin for PTY process — send Ctrl+D (0x04) instead"));
        };
        *stdin.lock().await = None;
        Ok(())
    }

    /// Gives its terminal another size.
    pub(super) fn resize(&self, cols: u16, rows: u16) -> Result<(), RpcError> {
        let Input::Pty { terminal, .. } = &self.input else { return Err(precondition("tty not assigned to process")) };
        child::resize(terminal.get_ref(), cols, rows)
            .map_err(|error| RpcError::new(Code::Internal, format!("error resizing tty: {error}")))
    }

    pub(super) fn signal(&self, signal: Signal) -> Result<(), RpcError> {
        signal::send(self.pid, signal)
            .map_err(|error| RpcError::new(Code::Internal, format!("error sending signal: {error}")))
    }

    /// Until it has ended and all it wrote is published.
    pub(super) async fn follow(&self, Follow(mut sources): Follow, mut child: Child) {
        let exit = loop {
            let chunk = tokio::select! {
                exit = child.wait() => break exit,
                chunk = next(&mut sources), if sources.iter().any(|source| source.open) => chunk,
            };
            if let Some(chunk) = chunk {
                self.hub.publish(|| chunk.frame()).await;
            }
        };
        for source in &mut sources {
            self.drain(source).await;
        }
        for source in sources.into_iter().filter(|source| source.open) {
            tokio::spawn(source.discard());
        }
        let end = exit.map_or_else(unknown_end, status::end);
        // Who writes to it lets go of its input.
        self.end.send_replace(Some(end));
        self.hub.close();
        if let Input::Pipe(stdin) = &self.input {
            *stdin.lock().await = None;
        }
    }

    /// Publishes what is left of one output.
    async fn drain(&self, source: &mut Source) {
        if matches!(self.input, Input::Pty { .. }) {
            // The leader's end hangs its terminal up: reading comes to an end.
            while let Ok(Some(chunk)) = timeout(HANG_UP, source.read()).await {
                self.hub.publish(|| chunk.frame()).await;
            }
            return;
        }
        // What a process in the background goes on writing has no end: what is there now is what counts.
        let mut left = ioctl_fionread(source.fd.get_ref()).unwrap_or_default();
        while let Some(chunk) = source.read_now(left) {
            left = left.saturating_sub(chunk.bytes.len() as u64);
            self.hub.publish(|| chunk.frame()).await;
        }
    }
}

/// The outputs of a process that are to be followed.
#[derive(Debug)]
pub(super) struct Follow(Vec<Source>);

/// A piece of output.
struct Chunk<'a> {
    bytes: &'a [u8],
    data: fn(String) -> Data,
}

impl Chunk<'_> {
    fn frame(&self) -> Bytes {
        connect::message(&Said { event: Event::Data((self.data)(STANDARD.encode(self.bytes))) })
    }
}

impl Source {
    fn new(fd: Arc<Fd>, data: fn(String) -> Data) -> Self {
        Self { fd, open: true, data, buffer: vec![0; CHUNK] }
    }

    /// The next piece; none at the end.
    async fn read(&mut self) -> Option<Chunk<'_>> {
        if !self.open {
            return None;
        }
        let count = fd::receive(&self.fd, &mut self.buffer).await.unwrap_or_default();
        self.open = count > 0;
        self.chunk(count)
    }

    /// A piece of at most `left` bytes of what is there now.
    fn read_now(&mut self, left: u64) -> Option<Chunk<'_>> {
        let most = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
        if !self.open || most == 0 {
            return None;
        }
        let fd: &OwnedFd = self.fd.get_ref();
        let count = fd::receive_now(fd, self.buffer.get_mut(..most)?).ok()?;
        self.open = count > 0;
        self.chunk(count)
    }

    fn chunk(&self, count: usize) -> Option<Chunk<'_>> {
        let bytes = self.buffer.get(..count).filter(|bytes| !bytes.is_empty())?;
        Some(Chunk { bytes, data: self.data })
    }

    /// Reads on for those in the background who still write, and who would be killed by a closed pipe.
    async fn discard(mut self) {
        while self.read().await.is_some() {}
    }
}

/// The next piece of any of them; none when one has ended. What is read is never lost, even if this is dropped while it waits.
async fn next(sources: &mut [Source]) -> Option<Chunk<'_>> {
    let (one, others) = sources.split_first_mut()?;
    match others.first_mut() {
        Some(other) if one.open && other.open => tokio::select! {
            chunk = one.read() => chunk,
            chunk = other.read() => chunk,
        },
        Some(other) if other.open => other.read().await,
        _ => one.read().await,
    }
}

fn precondition(message: impl Into<String>) -> RpcError {
    RpcError::new(Code::FailedPrecondition, message)
}

/// Its status could not be had: somebody else waited for it.
fn unknown_end(error: io::Error) -> End {
    let status = format!("wait: {error}");
    End { exit_code: -1, exited: false, error: Some(status.clone()), status }
}
