//! A VMM process from outside, and what goes with it.
//!
//! ```text
//!  born (`spawner`) ─▶ child ─────────────────────┐
//!  left by another node ─▶ found ─▶ adopted ──────┼─ end ─▶ killed, its end seen ─▶ group removed ─▶ uid back
//!                              ▲                    └─ leave ─┐
//!                              └──────────────────────────────┘
//! ```

use std::{
    fs, io,
    os::{fd::OwnedFd, unix::process::ExitStatusExt},
    path::PathBuf,
};

use nix::sys::signal::Signal;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, pidfd_open, pidfd_send_signal},
};
use serde::{Deserialize, Serialize};
use stasis_state::Process;
use tokio::process::Child;

use super::uids::Lease;
use crate::cgroup::Group;

/// What a process is found again by, and what it holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holder {
    pub(crate) process: Process,
    pub(crate) uid: u32,
    /// Its control group, where there is one.
    pub(crate) group: Option<PathBuf>,
}

/// A process, and what goes with it. Dropping it kills it; fields are dropped in this order.
#[derive(Debug)]
pub(crate) struct Born {
    life: Life,
    group: Option<Group>,
    uid: Lease,
}

#[derive(Debug)]
enum Life {
    Child(Child),
    Adopted(Adopted),
    #[cfg(test)]
    Fake(super::fake::Switch),
}

/// A process that another node has started.
#[derive(Debug)]
struct Adopted {
    pid: u32,
    handle: OwnedFd,
}

impl Born {
    /// A child, which is killed when it is dropped.
    pub(crate) fn child(child: Child, group: Option<Group>, uid: Lease) -> Self {
        Self { life: Life::Child(child), group, uid }
    }

    /// The process that `handle` is of, which another node has started.
    pub(crate) fn adopted(pid: u32, handle: OwnedFd, group: Option<Group>, uid: Lease) -> Self {
        Self { life: Life::Adopted(Adopted { pid, handle }), group, uid }
    }

    #[cfg(test)]
    pub(crate) fn fake(switch: super::fake::Switch, uid: Lease) -> Self {
        Self { life: Life::Fake(switch), group: None, uid }
    }

    /// Its process id, until it has been reaped.
    pub(crate) fn pid(&self) -> Option<u32> {
        match &self.life {
            Life::Child(child) => child.id(),
            Life::Adopted(adopted) => Some(adopted.pid),
            #[cfg(test)]
            Life::Fake(switch) => Some(switch.pid),
        }
    }

    pub(crate) fn holder(&self) -> io::Result<Holder> {
        let process = self.pid().and_then(process_of).ok_or_else(|| io::Error::other("/proc is not mounted"))?;
        let group = self.group.as_ref().map(|group| group.place().to_owned());
        Ok(Holder { process, uid: self.uid.uid(), group })
    }

    /// Lets it go on without this node: it, its group and its uid are the next one's.
    pub(crate) fn leave(self) {
        // Dropping any part would end that.
        std::mem::forget(self);
    }

    /// Kills the process, if it still lives, and waits for its end.
    pub(crate) async fn end(&mut self) -> io::Result<()> {
        let pid = self.pid();
        match &mut self.life {
            Life::Adopted(adopted) => {
                kill(&adopted.handle)?;
                let handle = adopted.handle.try_clone()?;
                tokio::task::spawn_blocking(move || ended(&handle, None)).await.map_err(io::Error::other)??;
            }
            #[cfg(test)]
            Life::Fake(switch) => switch.end().await,
            Life::Child(child) => {
                child.start_kill()?;
                let status = child.wait().await?;
                // The signal that ended it first counts, and this one comes from its seccomp filters alone.
                if status.signal() == Some(Signal::SIGSYS as i32) {
                    tracing::error!(
                        pid,
                        uid = self.uid.uid(),
                        "a VMM process was killed for a system call that it may not make: its guest may have taken it over. The kernel's log has the call"
                    );
                }
            }
        }
        Ok(())
    }

    pub(crate) async fn enter_group(&mut self) -> io::Result<()> {
        let (Some(group), Some(pid)) = (&self.group, self.pid()) else { return Ok(()) };
        let procs = group.procs();
        // Waits for all CPUs, some milliseconds.
        tokio::task::spawn_blocking(move || fs::write(procs, pid.to_string())).await.map_err(io::Error::other)?
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        // As a child is; one that has ended needs no killing.
        let _ = kill(&self.handle);
    }
}

/// Kills a process; one that has ended is well as it is.
pub(crate) fn kill(handle: &OwnedFd) -> io::Result<()> {
    match pidfd_send_signal(handle, rustix::process::Signal::KILL) {
        Err(rustix::io::Errno::SRCH) => Ok(()),
        other => Ok(other?),
    }
}

/// Waits for a process's end, as long as `limit`; whether it has come.
pub(crate) fn ended(handle: &OwnedFd, limit: Option<&Timespec>) -> io::Result<bool> {
    loop {
        match poll(&mut [PollFd::new(handle, PollFlags::IN)], limit) {
            Err(rustix::io::Errno::INTR) => {}
            other => return Ok(other? > 0),
        }
    }
}

/// A descriptor of the process, if it still lives. A later process with its id is not taken for it.
pub(crate) fn find(process: Process) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    let handle = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(None),
        other => other?,
    };
    // Looked at behind the opening: if it is this process now, then it was when the descriptor was made.
    Ok((process_of(process.pid) == Some(process)).then_some(handle))
}

/// The process that has an id now, unless it has ended and only waits for its parent to take note.
pub(crate) fn process_of(pid: u32) -> Option<Process> {
    let started = parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
    Some(Process { pid, started })
}

/// When the process of proc(5)'s `stat` started: field 22. Field 3 is its state, `Z` or `X` of one that has ended; the second, in parentheses,
/// may hold anything, so counting begins behind it.
fn parse_stat(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let started = fields.nth(18)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(started)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_time_is_found_behind_any_name_and_not_of_one_that_has_ended() {
        let rest = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
        for (stat, started) in [
            (format!("9 (sh) S {rest}"), Some(4711)),
            (format!("9 (a) R 1 (b) S {rest}"), Some(4711)),
            (format!("9 (sh) Z {rest}"), None),
            (format!("9 (sh) X {rest}"), None),
            ("9 (sh) S 1 2".into(), None),
            (String::new(), None),
        ] {
            assert_eq!(parse_stat(&stat), started, "{stat}");
        }
    }

    #[test]
    fn a_later_process_with_the_same_id_is_not_found() {
        let own = process_of(std::process::id()).unwrap();
        assert!(find(own).unwrap().is_some());
        assert!(find(Process { started: own.started + 1, ..own }).unwrap().is_none());
        assert!(find(Process { pid: 0, ..own }).unwrap().is_none());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let gone = process_of(child.id()).unwrap_or(Process { pid: child.id(), started: 0 });
        child.wait().unwrap();
        assert!(find(gone).unwrap().is_none());
    }
}
