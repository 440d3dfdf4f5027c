//! The function's process: its start, its end, and the end of everything else that is left to PID 1.
//!
//! ```text
//!              spawn            waitpid
//!  (nothing) ────────► running ─────────► exited(status)     written once, by the reaper thread;
//!                                                            read by readiness, the server and the console
//! ```

use std::{
    fmt, io,
    process::Command,
    sync::{Arc, Condvar, Mutex, PoisonError},
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

/// Starts `command` and a thread that reaps it and every orphan after it; `told` is called with how it ended.
///
/// To be called once: the thread waits for any child of this process.
///
/// # Errors
/// The command or the thread could not be started.
pub fn spawn(command: &mut Command, told: impl FnOnce(Exit) + Send + 'static) -> io::Result<Arc<End>> {
    let child = command.spawn()?;
    let pid = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
    let end = Arc::new(End::default());
    let ended = Arc::clone(&end);
    // Only now: a failing spawn waits for its child itself.
    thread::Builder::new().name("reaper".into()).stack_size(SMALL_STACK).spawn(move || {
        let mut told = Some(told);
        reap(|dead, exit| {
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

/// Waits for children until none is left. The agent starts nothing after the function, and orphans descend from that:
/// without a child there will be none.
fn reap(mut each: impl FnMut(Pid, Exit)) {
    loop {
        match wait() {
            Ok(WaitStatus::Exited(pid, status)) => each(pid, Exit::Status(status)),
            Ok(WaitStatus::Signaled(pid, signal, _)) => each(pid, Exit::Signal(signal)),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn its_status_is_known_and_waits_end_at_once() {
        let (tell, told) = mpsc::channel();
        // The only test of this binary that may have children: the reaper takes any.
        let end =
            spawn(Command::new("/bin/sh").args(["-c", "(exit 9) & exit 3"]), move |exit| tell.send(exit).unwrap())
                .unwrap();
        assert_eq!(end.within(Duration::from_secs(20)), Some(Exit::Status(3)));
        assert_eq!(told.recv().unwrap(), Exit::Status(3));
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
