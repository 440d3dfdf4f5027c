//! A VM's way to its request, and back.
//!
//! ```text
//!  restore ──▶ Paused ──wake──▶ Awake ──lease dropped──▶ Slot (used)
//!                ▲ │              │                       │
//!                │ └─ repair fails ┴─▶ destroyed ◀─ fails ┤
//!                └───────────── next generation ◀─ rewind ┘
//! ```

use std::{
    fs::File,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::{BoxFuture, FutureExt};
use stasis_guest_wire::{
    AGENT_PORT,
    wake::{Certificate, Wake},
};
use stasis_vmm_api::{MachineSpec, Phases, Reply, Request};
use tokio::net::UnixStream;
use uuid::Uuid;

use crate::{
    admission::{self, Admission, Charge, Full, Reservation},
    agent::{self, AgentError},
    metrics,
    pager::{Attached, PagerError},
    template::{Template, TemplateError},
    vmm::{Spawner, Vmm, VmmError},
};

/// The first life of every VM.
const FIRST_GENERATION: u64 = 1;
/// Longest time that a rewind may take.
const REWIND_LIMIT: Duration = Duration::from_secs(10);

/// Why a VM could not be restored or woken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RestoreError {
    /// The template is refused.
    #[error("the template is refused: {0}")]
    Template(#[from] TemplateError),
    /// The VMM process failed.
    #[error("the VM cannot be restored: {0}")]
    Vmm(#[from] VmmError),
    /// The template's pager failed.
    #[error(transparent)]
    Pager(#[from] PagerError),
    /// There is no memory for the template's pager.
    #[error("the template's pager cannot start: {0}")]
    Memory(#[from] Full),
    /// The repair failed.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// `/dev/kvm` or `/dev/userfaultfd` cannot be opened.
    #[error("{path}: {reason}; see `stasis doctor`")]
    Kvm {
        /// Its path.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Something was not done in time.
    #[error("{0} was not done within {1:?}")]
    Late(&'static str, Duration),
}

impl RestoreError {
    /// Whether the template was made for another kind of host.
    pub(crate) fn is_incompatible(&self) -> bool {
        matches!(self, Self::Vmm(VmmError::Incompatible(_)))
    }
}

/// `/dev/kvm`, for a VMM process.
pub(crate) fn open_kvm() -> Result<File, RestoreError> {
    open_device("/dev/kvm")
}

fn open_device(path: &str) -> Result<File, RestoreError> {
    let path = PathBuf::from(path);
    File::options()
        .read(true)
        .write(true)
        .open(&path)
        .map_err(|error| RestoreError::Kvm { path, reason: error.to_string() })
}

/// What stays of a VM through all its lives.
#[derive(Debug)]
pub(crate) struct Slot {
    /// Names it among all slots.
    pub(crate) id: Uuid,
    pub(crate) vmm: Vmm,
    pub(crate) template: Arc<Template>,
    /// Its root disk, a clone of the template's.
    pub(crate) disk: File,
    /// Counts its lives.
    pub(crate) generation: u64,
    /// Where a pager fills its memory.
    pub(crate) attached: Option<Attached>,
}

/// A VM as the template's snapshot has it: paused, and nothing has run in it since.
#[derive(Debug)]
pub(crate) struct Paused {
    /// Names this life.
    pub(crate) id: Uuid,
    pub(crate) slot: Slot,
    /// From the start of its restore or rewind to its end.
    pub(crate) took: Duration,
}

/// A VM that has proved its repair.
#[derive(Debug)]
pub(crate) struct Awake {
    pub(crate) id: Uuid,
    pub(crate) slot: Slot,
    pub(crate) stream: UnixStream,
    /// What the agent proved.
    pub(crate) certificate: Certificate,
    /// Until the vCPUs ran.
    pub(crate) claim: Duration,
    /// From there to the verified certificate.
    pub(crate) repair: Duration,
}

/// Where paused VMs come from.
pub(crate) trait Restore: std::fmt::Debug + Send + Sync {
    /// Restores one.
    fn restore(&self, template: Arc<Template>, reservation: Reservation)
    -> BoxFuture<'_, Result<Paused, RestoreError>>;

    /// Makes a used VM one of them again. One for which that fails is destroyed.
    fn rewind(&self, used: Slot) -> BoxFuture<'_, Result<Paused, RestoreError>>;
}

/// From the template's snapshot, each in a process of its own.
#[derive(Debug)]
pub(crate) struct FromSnapshot {
    /// Where VMM processes come from.
    pub(crate) spawner: Spawner,
    /// What pagers take their memory from.
    pub(crate) admission: Admission,
}

impl Restore for FromSnapshot {
    fn restore(
        &self,
        template: Arc<Template>,
        reservation: Reservation,
    ) -> BoxFuture<'_, Result<Paused, RestoreError>> {
        restore(self, template, reservation).boxed()
    }

    fn rewind(&self, used: Slot) -> BoxFuture<'_, Result<Paused, RestoreError>> {
        used.rewind().boxed()
    }
}

async fn restore(
    source: &FromSnapshot,
    template: Arc<Template>,
    reservation: Reservation,
) -> Result<Paused, RestoreError> {
    let started = Instant::now();
    let files = template.restore_files()?;
    let mut for_shell = vec![open_kvm()?.into()];
    let machine = template.machine();
    let (mut image, mut attached, mut pager_socket) = (files.image, None, None);
    if machine.paged {
        for_shell.push(open_device("/dev/userfaultfd")?.into());
        let pager = template.pager(&source.spawner, &source.admission, image).await?;
        let (vm, for_vmm) = pager.attach().await?;
        (image, attached, pager_socket) = (for_vmm.memory, Some(vm), Some(for_vmm.socket));
    }
    for_shell.push(files.state);
    let disk = files.root.try_clone().map_err(|error| VmmError::Failed(error.to_string()))?;
    let disks = [files.root.into(), files.app];
    let files = [image].into_iter().chain(pager_socket).chain(disks).collect();
    let vmm = born(&source.spawner, machine, reservation, for_shell, files).await?;
    let (name, pid) = (template.info().spec.name.clone(), vmm.pid());
    let slot = Slot { id: Uuid::new_v4(), vmm, template, disk, generation: FIRST_GENERATION, attached };
    let took = started.elapsed();
    // Beside all else: nobody waits for it.
    tokio::task::spawn_blocking(move || metrics::stands_ready(&name, pid));
    Ok(slot.paused(took))
}

/// A process with a paused VM in it, restored from a snapshot: what `Prepare` takes, then what `Restore` does.
pub(crate) async fn born(
    spawner: &Spawner,
    machine: MachineSpec,
    reservation: Reservation,
    for_shell: Vec<OwnedFd>,
    files: Vec<OwnedFd>,
) -> Result<Vmm, VmmError> {
    let (vmm, _) = Vmm::spawn(spawner, &machine, reservation).await?;
    // One behind the other: the process starts, prepares and restores without waiting for us.
    let prepared = vmm.start(Request::Prepare { machine, restores: true }, for_shell).await?;
    let restored = vmm.start(Request::Restore, files).await?;
    prepared.done().await?;
    match restored.wait().await? {
        Reply::Built(Phases { memory, state }) => tracing::debug!(?memory, ?state, pid = vmm.pid(), "restored"),
        other => return Err(VmmError::Protocol(Box::new(other))),
    }
    Ok(vmm)
}

impl Slot {
    fn paused(self, took: Duration) -> Paused {
        Paused { id: Uuid::new_v4(), slot: self, took }
    }

    async fn rewind(self) -> Result<Paused, RestoreError> {
        let started = Instant::now();
        let slot = match tokio::time::timeout(REWIND_LIMIT, self.rewind_machine()).await {
            Ok(rewound) => rewound?,
            Err(_) => return Err(RestoreError::Late("a rewind", REWIND_LIMIT)),
        };
        // The guest is paused and its devices are idle: nobody else uses the disk now.
        let reset = move || slot.template.reset_disk(&slot.disk).map(|()| slot);
        let slot = tokio::task::spawn_blocking(reset).await.map_err(|error| VmmError::Failed(error.to_string()))??;
        Ok(slot.paused(started.elapsed()))
    }

    /// It stands ready, and counts with what it is expected to write.
    pub(crate) fn is_paused(&self) {
        // Where that is more than it has, which takes an expectation that has just grown beyond all of its memory, it keeps that.
        let _ = self.vmm.promise().change(&self.template.paused_charge());
    }

    /// It has served, and will soon stand ready again.
    pub(crate) fn comes_back(&self) {
        self.vmm.promise().becomes(&self.template.paused_charge());
    }

    /// Before it may run it is promised all that it may use: at once, or by then, at its place in the line, while that is on its way back or
    /// `others` may give it up.
    pub(crate) async fn may_run(
        &self,
        place: &mut Option<admission::Place>,
        until: tokio::time::Instant,
        others: impl Fn() -> bool,
    ) -> Result<(), Full> {
        self.vmm.promise().change_until(&Charge::running(self.template.info()), place, until, others).await
    }

    /// A place in the line for what it lacks to run.
    pub(crate) fn line_up(&self) -> admission::Place {
        self.vmm.promise().line_up(&Charge::running(self.template.info()))
    }

    /// The same at once, or not.
    pub(crate) fn may_run_now(&self) -> Result<(), Full> {
        self.vmm.promise().change(&Charge::running(self.template.info()))
    }

    /// All but the disk.
    pub(crate) async fn rewind_machine(mut self) -> Result<Self, RestoreError> {
        if let (FIRST_GENERATION, Some(attached)) = (self.generation, &self.attached) {
            let report = attached.settled().await?;
            tracing::debug!(?report, pid = self.vmm.pid(), "the first answer of a paged VM");
        }
        match self.vmm.call(Request::Rewind, Vec::new()).await? {
            Reply::Rewound(report) => {
                tracing::debug!(?report, pid = self.vmm.pid(), "rewound");
                self.template.dirty().record(report.dirty_bytes);
                metrics::life_wrote(&self.template.info().spec.name, report.dirty_bytes);
            }
            other => return Err(VmmError::Protocol(Box::new(other)).into()),
        }
        self.generation += 1;
        self.is_paused();
        Ok(self)
    }
}

impl Paused {
    /// Lets the VM run, has it repair its identity and checks the proof.
    pub(crate) async fn wake(self, limit: Duration) -> Result<Awake, RestoreError> {
        match tokio::time::timeout(limit, self.wake_unlimited()).await {
            Ok(result) => result,
            Err(_) => Err(RestoreError::Late("the proof of a repair", limit)),
        }
    }

    async fn wake_unlimited(self) -> Result<Awake, RestoreError> {
        let Self { id, slot, .. } = self;
        let identity = agent::new_identity(id, slot.generation)?;
        let Proved { stream, certificate, claim, repair } = awaken_first(&slot.vmm, identity, &slot.template).await?;
        tracing::debug!(vm = %id, slot = %slot.id, ?claim, ?repair, ?certificate, "awake");
        Ok(Awake { id, slot, stream, certificate, claim, repair })
    }
}

/// What a guest that was let run has proved.
pub(crate) struct Proved {
    pub(crate) stream: UnixStream,
    pub(crate) certificate: Certificate,
    /// Until the vCPUs ran.
    pub(crate) claim: Duration,
    /// From there to the verified certificate.
    pub(crate) repair: Duration,
}

/// Lets a paused VM run, has it repair its identity as ordered and checks the proof.
pub(crate) async fn awaken(vmm: &Vmm, order: Wake, kernel_boot_id: &str) -> Result<Proved, RestoreError> {
    order_repair(vmm, order, kernel_boot_id, true).await
}

/// The same for one that runs already, since an order was lost or could not be left.
pub(crate) async fn order_again(vmm: &Vmm, order: Wake, kernel_boot_id: &str) -> Result<Proved, RestoreError> {
    order_repair(vmm, order, kernel_boot_id, false).await
}

/// The same for one in which nothing has run since its restore or rewind: its guest may be waiting for the order at its wake page.
///
/// That one is connected to after its proof, since until then it would only do the one instead of the other; and its connection leads to the function
/// without a word of the agent, so that what follows need not wait for one.
async fn awaken_first(vmm: &Vmm, order: Wake, template: &Template) -> Result<Proved, RestoreError> {
    let kernel_boot_id = &template.info().kernel_boot_id;
    if !template.has_wake_page() {
        return awaken(vmm, order, kernel_boot_id).await;
    }
    let started = Instant::now();
    let ordered = vmm.order_wake(agent::order_text(&order)?).await?;
    let resumed = vmm.start(Request::Resume, Vec::new()).await?;
    let Some(found) = ordered.found().await? else {
        template.has_no_wake_page();
        resumed.done().await?;
        return order_again(vmm, order, kernel_boot_id).await;
    };
    resumed.done().await?;
    let claim = started.elapsed();
    let proof = async { Ok(agent::proved(&found.answer().await?, &order, kernel_boot_id)?) };
    let certificate = or_its_end(vmm, proof).await?;
    let (mut stream, far) = agent::stream_pair().map_err(|error| VmmError::Failed(error.to_string()))?;
    agent::pass(&mut stream).await.map_err(AgentError::from)?;
    vmm.order(Request::Connect { port: AGENT_PORT }, vec![far.into()]).await?;
    Ok(Proved { stream, certificate, claim, repair: started.elapsed() - claim })
}

/// A guest that ends proves nothing any more.
async fn or_its_end<T>(vmm: &Vmm, proof: impl Future<Output = Result<T, RestoreError>>) -> Result<T, RestoreError> {
    tokio::select! {
        proof = proof => proof,
        fate = vmm.ended() => Err(VmmError::Gone(fate.guest.map(|ended| format!(": {}", ended.why)).unwrap_or_default()).into()),
    }
}

async fn order_repair(vmm: &Vmm, order: Wake, kernel_boot_id: &str, paused: bool) -> Result<Proved, RestoreError> {
    let started = Instant::now();
    let (mut stream, far) = agent::stream_pair().map_err(|error| VmmError::Failed(error.to_string()))?;
    // All is under way before the guest runs its first instruction: the connection waits in its queue, the message in the socket.
    let connected = vmm.start(Request::Connect { port: AGENT_PORT }, vec![far.into()]).await?;
    let resumed = if paused { Some(vmm.start(Request::Resume, Vec::new()).await?) } else { None };
    connected.done().await?;
    if let Some(resumed) = resumed {
        resumed.done().await?;
    }
    let claim = started.elapsed();
    let proof = async { Ok(agent::wake(&mut stream, order, kernel_boot_id).await?) };
    let certificate = or_its_end(vmm, proof).await?;
    Ok(Proved { stream, certificate, claim, repair: started.elapsed() - claim })
}
