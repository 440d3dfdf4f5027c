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
use stasis_pool::Orphan;

use crate::{running::Running, up::SAVE};

/// What a stopping server may take: it lets requests finish for ten seconds, tries two minutes to bring sandboxes to disk, and ends its VMs.
const LIMIT: Timespec = Timespec { tv_sec: 240, tv_nsec: 0 };

#[derive(Debug, clap::Args)]
pub(crate) struct DownArgs {
    /// The data directory of the `stasis up` to stop
    #[arg(long, env = "STASIS_DATA", default_value = ".stasis", value_name = "DIR")]
    data: PathBuf,
    /// Only stop the server: sandboxes' VMs go on as they are, and the next `stasis up` takes them over
    #[arg(long, conflicts_with = "kill")]
    keep: bool,
    /// End all VMs: of a sandbox that is not hibernated, nothing is left but a record that it failed
    #[arg(long)]
    kill: bool,
}

pub(crate) async fn run(args: &DownArgs) -> anyhow::Result<ExitCode> {
    let mut out = io::stdout();
    if !args.data.exists() {
        writeln!(out, "nothing runs in {}", args.data.display())?;
        return Ok(ExitCode::SUCCESS);
    }
    let running = Running::find(&args.data);
    if let Some(running) = running {
        // Without being told to save them it leaves sandboxes' VMs as they are.
        stop(running, if args.keep || args.kill { Signal::TERM } else { SAVE })?;
        Running::forget(&args.data)?;
    }
    let data = args.data.join("data");
    let ended = match args.kill {
        true => stasis_pool::end_orphans(&data).context("the VMs that a stasis left")?,
        false => 0,
    };
    let orphans = stasis_pool::orphans(&data).await.context("the VMs that a stasis left")?;
    if !orphans.is_empty() {
        let stopped = if running.is_some() { "stopped" } else { "no server runs" };
        writeln!(out, "{stopped} ({}), but {} VMs of sandboxes go on:", args.data.display(), orphans.len())?;
        for orphan in &orphans {
            writeln!(out, "  {}", described(orphan))?;
        }
        writeln!(
            out,
            "`stasis up` takes them over, and `stasis down` then tries to bring them to disk; `stasis down --kill` ends them, and what is in their memory is lost"
        )?;
        return Ok(if args.keep { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    stasis_pool::sweep_groups();
    let left = stasis_cow::volume::detach_leftovers(&args.data)?;
    let what = match (running.is_some(), ended, left) {
        (true, 0, _) => "stopped",
        (true, ..) => "stopped, and sandboxes' VMs ended",
        (false, 0, false) => "nothing runs",
        (false, 0, true) => "nothing ran; what a killed stasis had left mounted is removed",
        (false, ..) => "nothing ran; what a stasis had left running and mounted is removed",
    };
    writeln!(out, "{what} ({})", args.data.display())?;
    Ok(ExitCode::SUCCESS)
}

fn described(Orphan { pid, sandbox }: &Orphan) -> String {
    match sandbox {
        Some((id, state)) => format!("{id}, {state}, process {pid}"),
        None => format!("process {pid}, which no record names"),
    }
}

/// Asks the process to stop and waits for its end.
fn stop(running: Running, signal: Signal) -> anyhow::Result<()> {
    let pid = Pid::from_raw(running.pid).context("the pid file holds no process id")?;
    let process = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        other => other.with_context(|| format!("process {}", running.pid))?,
    };
    pidfd_send_signal(&process, signal).with_context(|| format!("process {} cannot be stopped", running.pid))?;
    let mut ended = [PollFd::new(&process, PollFlags::IN)];
    if poll(&mut ended, Some(&LIMIT))? == 0 {
        bail!("process {} has not ended within {} s; its log says why", running.pid, LIMIT.tv_sec);
    }
    Ok(())
}
