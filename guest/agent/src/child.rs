//! The function's process: its start, its end, and the end of everything else that is left to PID 1.
//!
//! ```text
//!              spawn            waitpid
//!  (nothing) ────────► running ─────────► exited(status)     written once, by the reaper thread;
//!                                                            read by readiness, the server and the console
//! ```

use std::{
    collections::HashMap,
    fmt,
    io::{self, PipeReader, PipeWriter, Read, Write},
    process::{Child, Command},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use nix::{
    errno::Errno,
    sys::{
        signal::Signal,
        wait::{WaitStatus, wait},
    },
    unistd::Pid,
};

use crate::output::SMALL_STACK;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// By itself.
    Status(i32),
    /// By a signal.
    Signal(Signal),
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "exited with status {status}"),
            Self::Signal(signal) => write!(f, "was killed by {signal}"),
        }
    }
}

/// Whether the function has ended, and how.
#[derive(Debug, Default)]
pub struct End {
    exit: Mutex<Option<Exit>>,
    changed: Condvar,
}

impl End {
    /// How it ended, waiting for that up to `timeout`.
    #[must_use]
    pub fn within(&self, timeout: Duration) -> Option<Exit> {
        let exit = self.exit.lock().unwrap_or_else(PoisonError::into_inner);
        *self.changed.wait_timeout_while(exit, timeout, |exit| exit.is_none()).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Records it.
    pub fn set(&self, exit: Exit) {
        *self.exit.lock().unwrap_or_else(PoisonError::into_inner) = Some(exit);
        self.changed.notify_all();
    }
}

/// The children of this process: one thread waits for all of them.
#[derive(Debug, Default)]
pub struct Children {
    /// Who waits for which, beside the function.
    waiting: Mutex<HashMap<Pid, PipeWriter>>,
    started: Condvar,
}

impl Children {
    fn waiting(&self) -> MutexGuard<'_, HashMap<Pid, PipeWriter>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts `command` and the thread that reaps it and every orphan; `told` is called with how it ended.
    ///
    /// To be called once, before any other.
    ///
    /// # Errors
    /// The command or the thread could not be started.
    pub fn spawn_function(
        self: &Arc<Self>,
        command: &mut Command,
        told: impl FnOnce(Exit) + Send + 'static,
    ) -> io::Result<Arc<End>> {
        let pid = pid_of(&command.spawn()?)?;
        let end = Arc::new(End::default());
        let (ended, children) = (Arc::clone(&end), Arc::clone(self));
        // Only now: a failing spawn waits for its child itself.
        thread::Builder::new().name("reaper".into()).stack_size(SMALL_STACK).spawn(move || {
            let mut told = Some(told);
            children.reap(|dead, exit| {
                if dead == pid
                    && let Some(told) = told.take()
                {
                    ended.set(exit);
                    told(exit);
                }
            });
        })?;
        Ok(end)
    }

    /// Starts another one. Its program must exist: a spawn that fails waits for its child itself, which the reaper may have done first. How it
    /// ended comes out of the pipe ([`read_exit`]).
    ///
    /// # Errors
    /// It could not be started.
    pub fn spawn(&self, command: &mut Command) -> io::Result<(Pid, PipeReader)> {
        let (exit, tell) = io::pipe()?;
        // Before the reaper can look for it.
        let mut waiting = self.waiting();
        let pid = pid_of(&command.spawn()?)?;
        waiting.insert(pid, tell);
        self.started.notify_all();
        Ok((pid, exit))
    }

    /// Waits for children, for ever: where there is none, until one is started. Orphans descend from children.
    fn reap(&self, mut each: impl FnMut(Pid, Exit)) {
        let mut ended = |pid, exit| {
            // Whoever asked for it may have left.
            let told = self.waiting().remove(&pid).map(|mut waiter| waiter.write_all(&encode(exit)));
            drop(told);
            each(pid, exit);
        };
        loop {
            match wait() {
                Ok(WaitStatus::Exited(pid, status)) => ended(pid, Exit::Status(status)),
                Ok(WaitStatus::Signaled(pid, signal, _)) => ended(pid, Exit::Signal(signal)),
                Ok(_) | Err(Errno::EINTR) => {}
                Err(_) => {
                    let none = self.started.wait_while(self.waiting(), |waiting| waiting.is_empty());
                    drop(none);
                }
            }
        }
    }
}

fn pid_of(child: &Child) -> io::Result<Pid> {
    i32::try_from(child.id()).map(Pid::from_raw).map_err(io::Error::other)
}

fn encode(exit: Exit) -> [u8; 5] {
    let (kind, number) = match exit {
        Exit::Status(status) => (0, status),
        Exit::Signal(signal) => (1, signal as i32),
    };
    let [a, b, c, d] = number.to_le_bytes();
    [kind, a, b, c, d]
}

/// How a child of [`Children::spawn`] ended: its status, or the signal's number.
///
/// # Errors
/// The pipe broke.
pub fn read_exit(exit: &mut PipeReader) -> io::Result<Result<i32, i32>> {
    let mut bytes = [0; 5];
    exit.read_exact(&mut bytes)?;
    let [kind, number @ ..] = bytes;
    let number = i32::from_le_bytes(number);
    Ok(if kind == 0 { Ok(number) } else { Err(number) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// In a process of its own, which nextest gives each test: the reaper takes any child.
    #[test]
    fn how_each_child_ended_is_told_to_who_started_it() {
        let (tell, told) = mpsc::channel();
        let children = Arc::new(Children::default());
        let end = children
            .spawn_function(Command::new("/bin/sh").args(["-c", "(exit 9) & exit 3"]), move |exit| {
                tell.send(exit).unwrap();
            })
            .unwrap();
        assert_eq!(end.within(Duration::from_secs(20)), Some(Exit::Status(3)));
        assert_eq!(told.recv().unwrap(), Exit::Status(3));
        // The function is gone, and with it the last child: others are waited for all the same.
        for (line, wanted) in [("exit 7", Ok(7)), ("kill -9 $$", Err(9)), ("exit 0", Ok(0))] {
            let (_, mut exit) = children.spawn(Command::new("/bin/sh").args(["-c", line])).unwrap();
            assert_eq!(read_exit(&mut exit).unwrap(), wanted, "{line}");
        }
    }

    #[test]
    fn a_wait_for_what_still_runs_ends_too() {
        assert_eq!(End::default().within(Duration::from_millis(5)), None);
    }

    #[test]
    fn an_end_reads_as_a_sentence() {
        assert_eq!(Exit::Status(3).to_string(), "exited with status 3");
        assert_eq!(Exit::Signal(Signal::SIGKILL).to_string(), "was killed by SIGKILL");
    }
}
