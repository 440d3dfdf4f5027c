//! The process that fills the memory of one template's VMs, for a template whose image is compressed.
//!
//! ```text
//!  first restore ──start──▶ image open ──attach, settled──▶ … ──template gone, or process gone──▶ killed and reaped
//! ```
//!
//! Its VMs end with it, by themselves (`vmm/src/memory/paged.rs`), and are replaced like any that die; the first of the replacements starts
//! the next pager.

use std::{
    collections::VecDeque,
    fs::{self, File},
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use nix::sys::memfd::{MFdFlags, memfd_create};
use stasis_vmm_api::{
    MachineSpec,
    pager::{FromPager, ImageFormat, PagerReply, PagerReport, PagerRequest},
};
use tokio::sync::{mpsc, oneshot};
use tokio_seqpacket::UnixSeqpacket;

use crate::{
    admission::Reservation,
    vmm::{Born, Role, Spawner, VmmError, wire},
};

/// Why a pager does not do what it is asked for.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum PagerError {
    /// A file that it needs cannot be had.
    #[error("the pager cannot be given {what}: {reason}")]
    File {
        /// Which.
        what: &'static str,
        /// Why.
        reason: String,
    },
    /// The process cannot be started.
    #[error(transparent)]
    Start(#[from] VmmError),
    /// The process has ended.
    #[error("the template's pager has ended; the next restore starts another")]
    Gone,
    /// It refused.
    #[error("the template's pager: {0}")]
    Failed(String),
    /// It answered something else.
    #[error("the template's pager answered {0:?}")]
    Protocol(PagerReply),
}

impl PagerError {
    fn file<E: ToString>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::File { what, reason: error.to_string() }
    }
}

/// A pager.
#[derive(Debug)]
pub(crate) struct Pager {
    calls: mpsc::Sender<Call>,
    /// What it fills, only to be read.
    memory: File,
    next: AtomicU64,
}

#[derive(Debug)]
struct Call {
    request: PagerRequest,
    files: Vec<OwnedFd>,
    reply: oneshot::Sender<PagerReply>,
}

/// A VM that a pager was told of.
#[derive(Debug)]
pub(crate) struct Attached {
    pager: Arc<Pager>,
    vm: u64,
}

/// What the VM's process is given.
pub(crate) struct ForVmm {
    pub(crate) memory: OwnedFd,
    pub(crate) socket: OwnedFd,
}

impl Pager {
    /// Starts one for an image of compressed frames. `reservation` is for its memory, and is given back when it has ended; `working_set` is a file
    /// that is made where it is missing.
    pub(crate) async fn start(
        spawner: &Spawner,
        machine: &MachineSpec,
        image: OwnedFd,
        working_set: &Path,
        reservation: Reservation,
    ) -> Result<Self, PagerError> {
        let filled = memfd_create(c"template-memory", MFdFlags::MFD_CLOEXEC).map_err(PagerError::file("its memory"))?;
        let filled = File::from(filled);
        filled.set_len(u64::from(machine.memory_mib) << 20).map_err(PagerError::file("its memory"))?;
        // VMs must not be able to write to it: it is all VMs'.
        let memory = File::open(format!("/proc/self/fd/{}", filled.as_raw_fd()));
        let memory = memory.map_err(PagerError::file("its memory"))?;
        let set = File::options().read(true).write(true).create(true).truncate(false).open(working_set);
        let set = set.map_err(PagerError::file("its working set"))?;

        let (socket, theirs) = UnixSeqpacket::pair().map_err(PagerError::file("a socket"))?;
        let (spawner, machine) = (spawner.clone(), machine.clone());
        let (calls, queue) = mpsc::channel(8);
        // In a task of its own: when the caller leaves, a process that is half born still has an owner, which waits for its end.
        let born = tokio::spawn(async move {
            let process = spawner.spawn(Role::Pager, &machine, theirs.into()).await?;
            let task = Task { socket, process, pending: VecDeque::new() };
            tokio::spawn(async move {
                task.run(queue).await;
                drop(reservation);
            });
            Ok::<_, VmmError>(())
        });
        born.await.map_err(PagerError::file("a task"))??;
        let pager = Self { calls, memory, next: AtomicU64::new(0) };
        let files = vec![image, filled.into(), set.into()];
        match pager.ask(PagerRequest::Open { format: ImageFormat::Frames }, files).await? {
            PagerReply::Done => Ok(pager),
            other => Err(PagerError::Protocol(other)),
        }
    }

    /// Its process lives.
    pub(crate) fn is_alive(&self) -> bool {
        !self.calls.is_closed()
    }

    async fn ask(&self, request: PagerRequest, files: Vec<OwnedFd>) -> Result<PagerReply, PagerError> {
        let (reply, answer) = oneshot::channel();
        self.calls.send(Call { request, files, reply }).await.map_err(|_| PagerError::Gone)?;
        match answer.await {
            Ok(PagerReply::Failed { reason }) => Err(PagerError::Failed(reason)),
            Ok(reply) => Ok(reply),
            Err(_) => Err(PagerError::Gone),
        }
    }

    /// Tells it of a VM that is about to be restored.
    pub(crate) async fn attach(self: Arc<Self>) -> Result<(Attached, ForVmm), PagerError> {
        let memory = self.memory.as_fd().try_clone_to_owned().map_err(PagerError::file("its memory"))?;
        let (ours, theirs) = UnixSeqpacket::pair().map_err(PagerError::file("a socket"))?;
        let vm = self.next.fetch_add(1, Ordering::Relaxed);
        match self.ask(PagerRequest::Attach { vm }, vec![ours.into()]).await? {
            PagerReply::Done => Ok((Attached { pager: self, vm }, ForVmm { memory, socket: theirs.into() })),
            other => Err(PagerError::Protocol(other)),
        }
    }
}

impl Attached {
    /// The VM has given its first answer.
    pub(crate) async fn settled(&self) -> Result<PagerReport, PagerError> {
        match self.pager.ask(PagerRequest::Settled { vm: self.vm }, Vec::new()).await? {
            PagerReply::Settled(report) => Ok(report),
            other => Err(PagerError::Protocol(other)),
        }
    }
}

struct Task {
    socket: UnixSeqpacket,
    process: Born,
    pending: VecDeque<oneshot::Sender<PagerReply>>,
}

impl Task {
    async fn run(mut self, mut calls: mpsc::Receiver<Call>) {
        let mut buffers = wire::Buffers::default();
        let pid = self.process.pid();
        loop {
            tokio::select! {
                call = calls.recv() => {
                    let Some(Call { request, files, reply }) = call else { break };
                    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                    match wire::send(&self.socket, &request, &files).await {
                        Ok(()) => self.pending.push_back(reply),
                        // The process is gone, which the other branch will see.
                        Err(error) => drop(reply.send(PagerReply::Failed { reason: error.to_string() })),
                    }
                }
                received = wire::receive(&self.socket, &mut buffers) => match received {
                    // Nobody may be waiting for it any more.
                    Ok(Some((FromPager::Reply(reply), _))) => drop(self.pending.pop_front().map(|waiting| waiting.send(reply))),
                    Ok(Some((FromPager::Lost { vm, reason }, _))) => tracing::error!(pid, vm, reason, "a VM ends: its memory cannot be filled"),
                    Ok(None) => {
                        tracing::error!(pid, "a pager has ended, and its VMs with it");
                        break;
                    }
                    Err(error) => {
                        tracing::error!(pid, %error, "a pager broke the protocol");
                        break;
                    }
                }
            }
        }
        drop(calls);
        self.pending.clear();
        if let Err(error) = self.process.end().await {
            tracing::error!(%error, "a pager cannot be ended");
        }
    }
}

/// Where a template's working set is kept: beside its folder, whose parts are sealed.
pub(crate) fn working_set_of(template: &Path) -> PathBuf {
    let name = template.file_name().unwrap_or_default().to_string_lossy();
    template.with_file_name(format!(".{name}.working-set"))
}

/// Removes it. A template that never had a pager has none.
pub(crate) fn forget_working_set(template: &Path) -> io::Result<()> {
    match fs::remove_file(working_set_of(template)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
