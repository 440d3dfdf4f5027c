//! What the function prints: a pipe, drained at all times, of which the last 64 KiB are kept.
//!
//! The thread that drains it has the idle scheduling policy. A function that logs a line in the middle of a request is
//! then not interrupted for it: the line is read once the processor has nothing better to do, or the pipe is full and
//! the function waits.

use std::{
    collections::VecDeque,
    io::{self, PipeReader, PipeWriter, Read},
    os::fd::AsFd,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::{
    console,
    poll::{PollFlags, wait},
};

/// How much is kept.
pub const KEPT: usize = 64 * 1024;

/// The last bytes of a stream.
#[derive(Debug)]
pub struct Tail {
    bytes: VecDeque<u8>,
    limit: usize,
}

impl Tail {
    /// An empty one that will hold `limit` bytes.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { bytes: VecDeque::with_capacity(limit), limit }
    }

    /// Appends, forgetting what is too old.
    pub fn push(&mut self, bytes: &[u8]) {
        let bytes = &bytes[bytes.len().saturating_sub(self.limit)..];
        let over = (self.bytes.len() + bytes.len()).saturating_sub(self.limit);
        self.bytes.drain(..over);
        self.bytes.extend(bytes);
    }

    /// The last `count` bytes as text.
    #[must_use]
    pub fn text(&self, count: usize) -> String {
        let last: Vec<u8> = self.bytes.iter().skip(self.bytes.len().saturating_sub(count)).copied().collect();
        String::from_utf8_lossy(&last).into_owned()
    }
}

/// The function's standard output and error.
#[derive(Debug)]
pub struct Output {
    pipe: PipeReader,
    tail: Mutex<Tail>,
}

impl Output {
    /// A new one, and the end for the function to write to.
    ///
    /// # Errors
    /// No pipe could be made.
    pub fn new() -> io::Result<(Arc<Self>, PipeWriter)> {
        let (pipe, writer) = io::pipe()?;
        fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        Ok((Arc::new(Self { pipe, tail: Mutex::new(Tail::new(KEPT)) }), writer))
    }

    /// Starts the thread that drains it.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn drain_in_background(self: &Arc<Self>) -> io::Result<()> {
        let output = Arc::clone(self);
        thread::Builder::new().name("output".into()).stack_size(SMALL_STACK).spawn(move || {
            if let Err(error) = idle_policy() {
                console::say(format_args!("output: no idle scheduling policy: {error}"));
            }
            while wait(&[(output.pipe.as_fd(), PollFlags::POLLIN)]).is_ok() && output.drain() {}
        })?;
        Ok(())
    }

    /// The last `count` bytes that the function printed, up to now.
    #[must_use]
    pub fn text(&self, count: usize) -> String {
        self.drain();
        self.tail.lock().unwrap_or_else(PoisonError::into_inner).text(count)
    }

    /// Reads what is there now; whether more may come.
    fn drain(&self) -> bool {
        let mut tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        let mut buffer = [0; 4096];
        loop {
            match (&self.pipe).read(&mut buffer) {
                Ok(0) => return false,
                Ok(count) => tail.push(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
        }
    }
}

/// Stack of the agent's helper threads: all of it is faulted in before the snapshot, so it is small.
pub(crate) const SMALL_STACK: usize = 64 * 1024;

/// Gives this thread, and it alone, the idle scheduling policy.
fn idle_policy() -> io::Result<()> {
    let parameter = libc::sched_param { sched_priority: 0 };
    // SAFETY: thread 0 is the caller; `parameter` is a whole sched_param that outlives the call, which only reads it.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameter) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn the_tail_keeps_the_last_bytes() {
        let mut tail = Tail::new(5);
        tail.push(b"abc");
        assert_eq!(tail.text(99), "abc");
        tail.push(b"defg");
        assert_eq!((tail.text(99), tail.text(2)), ("cdefg".into(), "fg".into()));
        tail.push(b"0123456789");
        assert_eq!(tail.text(99), "56789");
        tail.push(b"");
        assert_eq!(tail.text(0), "");
    }

    #[test]
    fn what_is_not_text_is_shown_all_the_same() {
        let mut tail = Tail::new(8);
        tail.push(b"a\xffb");
        assert_eq!(tail.text(8), "a\u{fffd}b");
    }

    #[test]
    fn more_than_the_pipe_holds_does_not_block_the_writer() {
        let (output, mut writer) = Output::new().unwrap();
        output.drain_in_background().unwrap();
        for number in 0..20_000 {
            writeln!(writer, "line {number}").unwrap();
        }
        drop(writer);
        assert!(output.text(KEPT).ends_with("line 19999\n"));
        assert!(output.text(KEPT).len() <= KEPT);
    }
}
