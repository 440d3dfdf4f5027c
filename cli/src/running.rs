//! Who runs in a data directory: `stasis.pid` holds the process id and its start time, so that a reused id is never mistaken for it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// A running `stasis up`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Running {
    pub(crate) pid: i32,
    started: u64,
}

fn file(data: &Path) -> PathBuf {
    data.join("stasis.pid")
}

/// Field 22 of `/proc/PID/stat` (proc(5)): clock ticks since boot at which the process started. None for one that has ended and is only not
/// yet waited for.
fn start_time(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field, in parentheses, may hold anything; counting begins behind it.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") { None } else { fields.nth(18)?.parse().ok() }
}

impl Running {
    /// Notes down that this process runs in `data`.
    pub(crate) fn record(data: &Path) -> io::Result<()> {
        let pid = i32::try_from(std::process::id()).map_err(io::Error::other)?;
        let started = start_time(pid).ok_or_else(|| io::Error::other("/proc is not mounted"))?;
        fs::write(file(data), format!("{pid} {started}\n"))
    }

    /// Who was noted down and still lives.
    pub(crate) fn find(data: &Path) -> Option<Self> {
        let text = fs::read_to_string(file(data)).ok()?;
        let (pid, started) = text.trim().split_once(' ')?;
        let running = Self { pid: pid.parse().ok()?, started: started.parse().ok()? };
        (start_time(running.pid) == Some(running.started)).then_some(running)
    }

    /// Forgets it.
    pub(crate) fn forget(data: &Path) -> io::Result<()> {
        match fs::remove_file(file(data)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_has_ended_runs_no_more_though_nobody_has_waited_for_it() {
        let data = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        fs::write(file(data.path()), format!("{pid} {}\n", start_time(pid).unwrap())).unwrap();
        assert!(Running::find(data.path()).is_some());
        drop(child.stdin.take());
        // Its end without taking note of it.
        let ended = rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT;
        rustix::process::waitid(rustix::process::WaitId::Pid(rustix::process::Pid::from_child(&child)), ended).unwrap();
        assert_eq!(Running::find(data.path()), None);
        child.wait().unwrap();
    }

    #[test]
    fn a_reused_pid_is_not_it() {
        let data = tempfile::tempdir().unwrap();
        assert_eq!(Running::find(data.path()), None);
        Running::record(data.path()).unwrap();
        let found = Running::find(data.path()).unwrap();
        assert_eq!(found.pid.unsigned_abs(), std::process::id());
        fs::write(file(data.path()), format!("{} {}\n", found.pid, found.started + 1)).unwrap();
        assert_eq!(Running::find(data.path()), None);
        Running::forget(data.path()).unwrap();
        Running::forget(data.path()).unwrap();
    }
}
