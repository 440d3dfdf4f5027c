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
use command_fds::{CommandFdExt as _, FdMapping};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use stasis_vmm_api::{
    CONTROL_FD, Client, Event, MOUNTS_FD, MachineSpec, NET_FD, Reply, Request,
    birth::{Nothing, PidNamespaces},
};

use super::guest::MEMORY_MIB;

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
    child: Child,
}

impl Births {
    pub(super) fn new() -> anyhow::Result<Self> {
        let nothing = Nothing::make().context("the empty namespaces cannot be made: run this as root")?;
        Ok(Self { program: std::env::current_exe()?, nothing, next_uid: Cell::new(FIRST_UID) })
    }

    /// A process with a shell of the test guest's machine.
    pub(super) fn shell(&self) -> anyhow::Result<Vmm> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let mut command = Command::new(&self.program);
        command
            .args(["vmm", "--uid", &self.next_uid.replace(self.next_uid.get() + 1).to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let pass = |fd: OwnedFd, child_fd| FdMapping { parent_fd: fd, child_fd };
        command.fd_mappings(vec![
            pass(theirs, CONTROL_FD),
            pass(self.nothing.mounts.try_clone()?, MOUNTS_FD),
            pass(self.nothing.net.try_clone()?, NET_FD),
        ])?;
        // In a thread of its own: one whose children are born elsewhere can start no threads, which KVM does in the measuring thread's name.
        let child = thread::spawn(move || PidNamespaces::new()?.with_new(|| command.spawn()))
            .join()
            .map_err(|_| anyhow!("the thread that starts processes panicked"))??;
        let mut vmm = Vmm { client: Client::new(ours), child };
        let kvm = kvm()?;
        let machine = MachineSpec { memory_mib: MEMORY_MIB, vcpus: 1, ..MachineSpec::default() };
        vmm.expect(&Request::Prepare(machine), &[&kvm])?;
        Ok(vmm)
    }
}

pub(super) fn kvm() -> anyhow::Result<File> {
    File::options().read(true).write(true).open("/dev/kvm").context("/dev/kvm: see `stasis doctor`")
}

impl Vmm {
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A request that is not refused.
    pub(super) fn expect(&mut self, request: &Request, files: &[&File]) -> anyhow::Result<Reply> {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        checked(self.client.ask(request, &files)?)
    }

    /// The guest runs until it pulls its reset line; both answers and the event in one go.
    pub(super) fn restore_and_run(&mut self, image: &File, state: &File) -> anyhow::Result<()> {
        self.client.send(&Request::Restore, &[image.as_fd(), state.as_fd()])?;
        self.client.send(&Request::Resume, &[])?;
        checked(self.client.reply()?)?;
        checked(self.client.reply()?)?;
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

fn checked(reply: Reply) -> anyhow::Result<Reply> {
    match reply {
        Reply::Failed { reason } => bail!("the VMM process: {reason}"),
        reply => Ok(reply),
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let ended = self.child.kill().and_then(|()| self.child.wait());
        if let Err(error) = ended {
            tracing::warn!(%error, "a VMM process cannot be ended");
        }
    }
}

/// The same file, to be read from its start.
pub(super) fn from_start(file: &File) -> io::Result<File> {
    use std::os::fd::AsRawFd as _;
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}
