//! Where VMM processes are born: each in a pid namespace and control group of its own, with a uid that no other has, and holding nothing
//! but its control socket and the empty namespaces. What it gives up by itself is in `vmm/src/jail.rs`.
//!
//! ```text
//!  uid taken ─▶ group made ─▶ born (a thread of its own) ─▶ in its group ─▶ … ─▶ reaped ─▶ group removed ─▶ uid back
//! ```

use std::{
    ffi::OsString,
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, mpsc},
    thread,
};

use stasis_vmm_api::{
    MachineSpec,
    birth::{Nothing, PidNamespaces},
};
use tokio::{
    process::{Child, Command},
    runtime::Handle,
    sync::oneshot,
};

use super::{
    VmmError,
    process::{Born, Holder},
    uids::{Lease, Uids},
};
use crate::cgroup::{Groups, Limits};

/// What a process is there for: the name of its subcommand.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Role {
    Vmm,
    Pager,
}

/// Starts VMM processes, and pagers in the same jail. Clones share all.
#[derive(Debug, Clone)]
pub(crate) struct Spawner(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    program: PathBuf,
    environment: Vec<(OsString, OsString)>,
    nothing: Nothing,
    uids: Uids,
    groups: Groups,
    orders: mpsc::Sender<Order>,
}

struct Order {
    command: Command,
    runtime: Handle,
    born: oneshot::Sender<io::Result<Child>>,
}

impl Spawner {
    /// Gets ready to start `program`, with nothing but `environment`, as uids from `uid_base` on.
    pub(crate) fn start(
        program: &Path,
        environment: Vec<(OsString, OsString)>,
        uid_base: u32,
        groups: Groups,
    ) -> io::Result<Self> {
        let nothing = Nothing::make()?;
        let (orders, queue) = mpsc::channel();
        let (ready, namespaces) = mpsc::channel();
        thread::Builder::new().name("births".into()).spawn(move || {
            let namespaces = PidNamespaces::new();
            let told = namespaces.as_ref().map(drop).map_err(|error| io::Error::from(error.kind()));
            if let (Ok(()), Ok(namespaces)) = (ready.send(told), namespaces) {
                deliver(&namespaces, &queue);
            }
        })?;
        namespaces.recv().map_err(io::Error::other)??;
        let (program, uids) = (program.to_owned(), Uids::new(uid_base));
        Ok(Self(Arc::new(Inner { program, environment, nothing, uids, groups, orders })))
    }

    #[cfg(test)]
    pub(crate) fn free_uids(&self) -> usize {
        self.0.uids.free()
    }

    /// Starts a process for `machine`, with `control` as its control socket.
    pub(crate) async fn spawn(&self, role: Role, machine: &MachineSpec, control: OwnedFd) -> Result<Born, VmmError> {
        let failed = |error: io::Error| VmmError::Spawn(error.to_string());
        let uid = self.0.uids.take().ok_or_else(|| VmmError::Spawn("all uids are taken".into()))?;
        let group = self.0.groups.make(uid.uid(), &Limits::of(machine)).map_err(failed)?;
        let command = self.command(role, uid.uid(), control).map_err(failed)?;
        let (born, child) = oneshot::channel();
        let gone = || VmmError::Spawn("the thread that starts processes is gone".into());
        self.0.orders.send(Order { command, runtime: Handle::current(), born }).map_err(|_| gone())?;
        let child = child.await.map_err(|_| gone())?.map_err(failed)?;
        let mut process = Born::child(child, group, uid);
        // It does nothing before its first request, which is sent after this.
        if let Err(error) = process.enter_group().await {
            // Its end, and only then the end of what goes with it.
            let killed = process.end().await;
            return Err(failed(killed.err().unwrap_or(error)));
        }
        Ok(process)
    }

    /// The uid of a process that another node has started, so that no other gets it. None if one has it already.
    pub(crate) fn take_uid(&self, uid: u32) -> Option<Lease> {
        self.0.uids.take_this(uid)
    }

    /// Takes over a process that another node has started.
    pub(crate) fn adopt(&self, holder: &Holder, handle: OwnedFd, uid: Lease) -> Born {
        let group = holder.group.as_ref().map(|place| self.0.groups.adopt(place));
        Born::adopted(holder.process.pid, handle, group, uid)
    }

    fn command(&self, role: Role, uid: u32, control: OwnedFd) -> io::Result<Command> {
        let Inner { program, environment, nothing, .. } = &*self.0;
        let mut command = Command::new(program);
        let role = match role {
            Role::Vmm => "vmm",
            Role::Pager => "pager",
        };
        command.arg(role).arg("--uid").arg(uid.to_string());
        command.env_clear().envs(environment.iter().map(|(name, value)| (name, value)));
        // Nothing that would need code of ours between fork and exec: so the kernel need not copy this process's page tables.
        command.stdin(Stdio::from(control)).stdout(Stdio::from(nothing.hand_over()?)).kill_on_drop(true);
        Ok(command)
    }
}

/// The thread's life: until the last [`Spawner`] is gone.
fn deliver(namespaces: &PidNamespaces, queue: &mpsc::Receiver<Order>) {
    while let Ok(Order { mut command, runtime, born }) = queue.recv() {
        let _inside = runtime.enter();
        let child = namespaces.with_new(|| command.spawn());
        // The command still holds the child's ends.
        drop(command);
        // Whoever ordered it may be gone; then the child is killed.
        let _ = born.send(child);
    }
}
