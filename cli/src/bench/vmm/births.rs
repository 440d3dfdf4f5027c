//! VMM processes, born in the jail as the node's are.

use std::{
    cell::Cell,
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
};

use anyhow::{Context as _, anyhow, bail};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use stasis_vmm_api::{
    Client, Event, MachineSpec, Reply, Request,
    birth::{Nothing, PidNamespaces},
};

/// Above all users of a host, and away from those that a node gives its VMs.
const FIRST_UID: u32 = 1_900_000_000;

/// Where they come from.
pub(super) struct Births {
    program: PathBuf,
    nothing: Nothing,
    next_uid: Cell<u32>,
}

/// A VMM process; it ends with this.
pub(super) struct Vmm {
    pub(super) client: Client,
    process: Process,
}

/// A process; dropping this kills it and waits for its end.
pub(super) struct Process(Child);

impl Births {
    pub(super) fn new() -> anyhow::Result<Self> {
        let nothing = Nothing::make().context("the empty namespaces cannot be made: run this as root")?;
        Ok(Self { program: std::env::current_exe()?, nothing, next_uid: Cell::new(FIRST_UID) })
    }

    /// A process with a shell for `machine`, and to be restored to `state` if there is one.
    pub(super) fn shell(&self, machine: &MachineSpec, state: Option<File>) -> anyhow::Result<Vmm> {
        let mut vmm = self.unprepared(machine, state)?;
        checked(vmm.client.reply()?)?;
        Ok(vmm)
    }

    /// The same before the shell is ready: its answer to `Prepare` is still to come.
    pub(super) fn unprepared(&self, machine: &MachineSpec, state: Option<File>) -> anyhow::Result<Vmm> {
        let (child, socket) = self.process("vmm")?;
        let vmm = Vmm { client: Client::new(socket), process: child };
        let mut files = vec![kvm()?];
        if machine.paged {
            files.push(userfaultfd()?);
        }
        let restores = state.is_some();
        files.extend(state);
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        vmm.client.send(&Request::Prepare { machine: machine.clone(), restores }, &files)?;
        Ok(vmm)
    }

    /// A process in the jail, in this role, and its control socket.
    pub(super) fn process(&self, role: &str) -> anyhow::Result<(Process, OwnedFd)> {
        let (ours, theirs) = packet_pair()?;
        let mut command = Command::new(&self.program);
        command
            .args([role, "--uid", &self.next_uid.replace(self.next_uid.get() + 1).to_string()])
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::from(self.nothing.hand_over()?));
        // In a thread of its own: one whose children are born elsewhere can start no threads, which KVM does in the measuring thread's name.
        let child = thread::spawn(move || PidNamespaces::new()?.with_new(|| command.spawn()))
            .join()
            .map_err(|_| anyhow!("the thread that starts processes panicked"))??;
        Ok((Process(child), ours))
    }
}

pub(super) fn packet_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

pub(super) fn kvm() -> anyhow::Result<File> {
    File::options().read(true).write(true).open("/dev/kvm").context("/dev/kvm: see `stasis doctor`")
}

/// What a paged VM needs beside it.
fn userfaultfd() -> anyhow::Result<File> {
    File::options().read(true).write(true).open("/dev/userfaultfd").context("/dev/userfaultfd: see `stasis doctor`")
}

impl Vmm {
    pub(super) fn pid(&self) -> u32 {
        self.process.0.id()
    }

    /// A request that is not refused.
    pub(super) fn expect(&mut self, request: &Request, files: &[&File]) -> anyhow::Result<Reply> {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        checked(self.client.ask(request, &files)?)
    }

    /// Restores from `files` and lets the guest run; returns when it does.
    pub(super) fn restore_and_resume(&mut self, files: &[&File]) -> anyhow::Result<()> {
        self.order_restore(files)?;
        self.is_restored()
    }

    /// Both requests at once; [`Vmm::is_restored`] hears the answers.
    pub(super) fn order_restore(&self, files: &[&File]) -> anyhow::Result<()> {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        self.client.send(&Request::Restore, &files)?;
        Ok(self.client.send(&Request::Resume, &[])?)
    }

    pub(super) fn is_restored(&mut self) -> anyhow::Result<()> {
        checked(self.client.reply()?)?;
        checked(self.client.reply()?)?;
        Ok(())
    }

    /// As [`Vmm::restore_and_resume`], and waits until the guest pulls its reset line.
    pub(super) fn restore_and_run(&mut self, files: &[&File]) -> anyhow::Result<()> {
        self.restore_and_resume(files)?;
        match self.client.event()? {
            Event::Stopped { .. } => Ok(()),
            other => bail!("the test guest did {other:?}"),
        }
    }

    /// Waits until the console ends with `byte`.
    pub(super) fn console_has(&mut self, byte: u8) -> anyhow::Result<()> {
        // The console tells nobody, so it is asked; outside of what is timed.
        loop {
            match self.expect(&Request::Console, &[])? {
                Reply::Console { tail } if tail.as_bytes().last() == Some(&byte) => return Ok(()),
                Reply::Console { .. } => thread::yield_now(),
                other => bail!("the VMM process answered {other:?}"),
            }
        }
    }
}

/// An answer that is no refusal.
pub(super) fn checked(reply: Reply) -> anyhow::Result<Reply> {
    match reply {
        Reply::Failed { reason } => bail!("the VMM process: {reason}"),
        reply => Ok(reply),
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let ended = self.0.kill().and_then(|()| self.0.wait());
        if let Err(error) = ended {
            tracing::warn!(%error, "a process cannot be ended");
        }
    }
}

/// The same file, to be read from its start.
pub(super) fn from_start(file: &File) -> io::Result<File> {
    use std::os::fd::AsRawFd as _;
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}
