//! `stasis down`.

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context, bail};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use crate::running::Running;

/// What a stopping server may take: it lets requests finish for ten seconds, then ends its VMs.
const LIMIT: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

#[derive(Debug, clap::Args)]
pub(crate) struct DownArgs {
    /// The data directory of the `stasis up` to stop
    #[arg(long, env = "STASIS_DATA", default_value = ".stasis", value_name = "DIR")]
    data: PathBuf,
}

pub(crate) fn run(args: &DownArgs) -> anyhow::Result<ExitCode> {
    let mut out = io::stdout();
    if !args.data.exists() {
        writeln!(out, "nothing runs in {}", args.data.display())?;
        return Ok(ExitCode::SUCCESS);
    }
    let running = Running::find(&args.data);
    if let Some(running) = running {
        stop(running)?;
        Running::forget(&args.data)?;
    }
    // A killed one's sandboxes live on for the next `stasis up`, which there is not to be.
    let ended = stasis_pool::end_kept(&args.data.join("data")).context("the VMs that a killed stasis left")?;
    stasis_pool::sweep_groups();
    let left = stasis_cow::volume::detach_leftovers(&args.data)?;
    let what = match (running.is_some(), ended, left) {
        (true, ..) => "stopped",
        (false, 0, false) => "nothing runs",
        (false, 0, true) => "nothing ran; what a killed stasis had left mounted is removed",
        (false, ..) => "nothing ran; what a killed stasis had left running and mounted is removed",
    };
    writeln!(out, "{what} ({})", args.data.display())?;
    Ok(ExitCode::SUCCESS)
}

/// Asks the process to stop and waits for its end.
fn stop(running: Running) -> anyhow::Result<()> {
    let pid = Pid::from_raw(running.pid).context("the pid file holds no process id")?;
    let process = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        other => other.with_context(|| format!("process {}", running.pid))?,
    };
    pidfd_send_signal(&process, Signal::TERM).with_context(|| format!("process {} cannot be stopped", running.pid))?;
    let mut ended = [PollFd::new(&process, PollFlags::IN)];
    if poll(&mut ended, Some(&LIMIT))? == 0 {
        bail!("process {} has not ended within 60 s; its log says why", running.pid);
    }
    Ok(())
}
