//! A sandbox's VM, and where it comes from.

use std::{
    fmt,
    fs::File,
    io,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::{TryFutureExt as _, future::BoxFuture};
use stasis_guest_wire::{
    AGENT_PORT,
    wake::{Certificate, Wake},
};
use stasis_pool_api::{ClaimError, SandboxError, SandboxId, SandboxLogs, TemplateInfo, TemplateName, Tenant};
use stasis_state::Process;
use stasis_vmm_api::Request;
use tokio::net::UnixStream;

use super::{
    kept::{self, Guest},
    saved::SaveError,
    visit::Opening,
};
use crate::{
    admission::Full,
    agent::{self, AgentError},
    build::chain,
    pool::Taken,
    restore::{Proved, RestoreError, Slot, awaken, order_again},
    template::{TemplateError, part},
    vmm::{Place, Vmm, VmmError},
};

pub(crate) use super::saved::FromPools;

/// Longest time that a woken guest may take to prove its repair.
const REPAIR_LIMIT: Duration = Duration::from_secs(20);
/// Connections that may meet one which the guest has not ended yet.
pub(super) const ATTEMPTS: u32 = 8;
/// Longest time that the agent may take to tell what the function has printed.
const LOGS_LIMIT: Duration = Duration::from_secs(10);
/// Longest time that stopping the vCPUs may take: they stop at their next exit.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// Why something could not be done to a sandbox's VM.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MachineError {
    /// There is none for a new sandbox.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// It could not be restored, woken or asked.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// It could not be saved, or what was saved cannot be used.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// It cannot be written down.
    #[error("the data directory cannot take what a VM needs to outlive this node: {0}; is it full?")]
    Keep(#[source] io::Error),
    /// The node has no room for it now, or cannot start it in time.
    #[error("{0}")]
    Full(#[from] Full),
    /// An earlier node has left it, it is of no use here, and it could not be ended.
    #[error(
        "its VM may live: {why}, and it cannot be ended: {error}; it keeps its memory, and is ended as soon as that is possible"
    )]
    Lives {
        /// Why it was to end.
        why: String,
        /// Why it did not.
        #[source]
        error: io::Error,
    },
    /// The pool took it back first.
    #[error("its VM ended before it was handed over")]
    Ended,
}

impl From<VmmError> for MachineError {
    fn from(error: VmmError) -> Self {
        Self::Restore(error.into())
    }
}

impl From<AgentError> for MachineError {
    fn from(error: AgentError) -> Self {
        Self::Restore(error.into())
    }
}

/// What comes of taking over a VM.
pub(crate) type Adopting<'a> = BoxFuture<'a, Result<Option<Machine>, MachineError>>;

impl MachineError {
    /// As whoever wanted that of the sandbox hears it, which is as it was.
    pub(super) fn told(&self, id: SandboxId, wanted: &'static str) -> SandboxError {
        match self {
            Self::Full(full) => SandboxError::NoCapacity { id, wanted, full: full.what, retry_after: full.retry_after },
            other => SandboxError::NotDone { id, wanted, reason: chain(other) },
        }
    }
}

/// Where sandboxes' VMs come from, and where they are kept.
pub(crate) trait Machines: fmt::Debug + Send + Sync {
    /// Makes one for a tenant, which runs.
    fn create<'a>(
        &'a self,
        tenant: &'a Tenant,
        template: &'a TemplateName,
        budget: Duration,
    ) -> BoxFuture<'a, Result<Machine, MachineError>>;

    /// Writes a stopped one to disk, over what is left of an earlier attempt. It stays as it is.
    fn save<'a>(&'a self, id: &'a SandboxId, machine: &'a Machine) -> BoxFuture<'a, Result<(), MachineError>>;

    /// Makes one from what was saved, and lets it run, if it can be started within `patience`.
    fn restore<'a>(&'a self, id: &'a SandboxId, patience: Duration) -> BoxFuture<'a, Result<Machine, MachineError>>;

    /// Takes a moment of a running one, which goes on, if so many children can be started within `patience`.
    fn fork<'a>(
        &'a self,
        machine: &'a Machine,
        children: u32,
        patience: Duration,
    ) -> BoxFuture<'a, Result<Moment, MachineError>>;

    /// Makes one that goes on from a moment, as somebody else: with an identity and a disk of its own.
    fn child<'a>(&'a self, moment: &'a Moment) -> BoxFuture<'a, Result<Machine, MachineError>>;

    /// Removes what was saved, if anything was.
    fn forget<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, Result<(), MachineError>>;

    /// The VM of this process, which an earlier node has left; none if it does not live. One that does not answer in time, or before it is
    /// given up, is ended. Each can be had once. Whoever leaves meanwhile leaves it as it was.
    fn adopt(&self, process: Process, given_up: BoxFuture<'static, ()>) -> Adopting<'_>;

    /// Ends the VM of this process, if an earlier node has left it and nobody has adopted it. While it cannot be ended it keeps what it holds.
    fn end(&self, process: Process) -> BoxFuture<'_, Result<(), MachineError>>;

    /// Why the VM of this process, which an earlier node has left, cannot be taken over; none if it can, or does not live. To be asked of each
    /// process that a record names: one that is written down nowhere can be ended from then on.
    fn fault(&self, process: Process) -> Option<String>;

    /// Ends those that none of these names.
    fn end_the_rest(&self, named: Vec<Process>) -> BoxFuture<'_, ()>;

    /// Leaves those that nobody has adopted as they are, for the next node.
    fn leave_the_rest(&self) -> Vec<Process>;
}

/// A moment of a running sandbox, of which any number of others can be made. Its files have no names, and are gone with it.
#[derive(Debug)]
pub(crate) struct Moment {
    pub(super) template: TemplateInfo,
    pub(super) image: File,
    pub(super) state: File,
    pub(super) disk: File,
    pub(super) app: File,
    /// Who its guest is, and which life it lives.
    pub(super) certificate: Certificate,
    /// Until when others may wait for what they need to be made of it.
    pub(super) until: tokio::time::Instant,
}

/// A VM that belongs to a sandbox. Dropping the last handle ends it.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(super) vmm: Vmm,
    pub(super) template: TemplateInfo,
    /// What its memory is a private mapping of.
    pub(super) image: File,
    pub(super) disk: File,
    pub(super) app: File,
    life: Mutex<Life>,
    /// Where it is written down, if it outlives this process.
    kept: Option<Place>,
}

/// Which life it lives.
#[derive(Debug)]
struct Life {
    certificate: Certificate,
    /// See [`Guest::ordered`].
    ordered: u64,
}

impl Machine {
    pub(super) fn new(vmm: Vmm, guest: Guest, files: [File; 3]) -> Self {
        let ([image, disk, app], Guest { template, certificate, ordered }) = (files, guest);
        Self { vmm, template, image, disk, app, life: Mutex::new(Life { certificate, ordered }), kept: None }
    }

    /// A VM that was taken from its template's pool.
    pub(crate) fn of(taken: Taken) -> Result<Self, MachineError> {
        let (Slot { vmm, template, disk, .. }, certificate) = taken.keep().ok_or(MachineError::Ended)?;
        let share = |name| template.share(name).map_err(|error: TemplateError| RestoreError::from(error));
        let files = [share(part::MEMORY)?, disk, share(part::APP)?];
        Ok(Self::new(vmm, Guest::proved(template.info().clone(), certificate), files))
    }

    /// It is written down there.
    pub(super) fn kept_at(self, place: Place) -> Self {
        Self { kept: Some(place), ..self }
    }

    /// Has it outlive this process, should that be killed: the next one finds it at `place`.
    pub(super) async fn keep(self, place: Place) -> Result<Self, MachineError> {
        let copies = [&self.image, &self.disk, &self.app].map(File::try_clone).into_iter();
        let files = copies.map(|copy| copy.map(Into::into)).collect::<Result<_, _>>().map_err(MachineError::Keep)?;
        // Written down first: a VM that outlives its node unseen would never end.
        if let Err(error) = kept::note(&place, self.vmm.holder(), self.guest()) {
            place.remove();
            return Err(MachineError::Keep(error));
        }
        self.vmm.keep(place.clone(), files).await?;
        Ok(self.kept_at(place))
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What its agent proved last.
    pub(super) fn certificate(&self) -> Certificate {
        self.life().certificate.clone()
    }

    /// Who is in it.
    pub(super) fn guest(&self) -> Guest {
        let life = self.life();
        Guest { template: self.template.clone(), certificate: life.certificate.clone(), ordered: life.ordered }
    }

    /// Its process, as long as that lives.
    pub(super) fn process(&self) -> Option<Process> {
        self.vmm.is_alive().then(|| self.vmm.process())
    }

    /// Connects `near`, whose other end is `far`, to the function, or has a command started. Nothing of a request has been sent when this fails.
    pub(super) async fn connect(
        &self,
        mut near: UnixStream,
        far: std::os::unix::net::UnixStream,
        opening: &Opening,
    ) -> Result<UnixStream, MachineError> {
        let connected =
            self.vmm.order(Request::Connect { port: AGENT_PORT }, vec![far.into()]).map_err(MachineError::from);
        let asked = async {
            match opening {
                Opening::Function => agent::forward(&mut near).await?,
                Opening::Command(exec, _) => agent::execute(&mut near, exec.clone()).await?,
            }
            Ok(())
        };
        // What is asked waits in the socket until it is connected.
        tokio::try_join!(connected, asked)?;
        Ok(near)
    }

    /// What its function, if it runs, and its console have said last.
    pub(super) async fn logs(&self, runs: bool) -> SandboxLogs {
        let output = async {
            let (mut near, far) = agent::stream_pair().map_err(SaveError::Io)?;
            self.vmm.order(Request::Connect { port: AGENT_PORT }, vec![far.into()]).await?;
            Ok::<_, MachineError>(agent::logs(&mut near).await?)
        };
        let output = if runs { tokio::time::timeout(LOGS_LIMIT, output).await.ok() } else { None };
        let output = output.map(|output| output.unwrap_or_else(|error| format!("(no output: {error})\n")));
        SandboxLogs { output, console: Some(self.vmm.console().await) }
    }

    /// Stops its vCPUs.
    pub(super) async fn stop(&self) -> Result<(), MachineError> {
        let stopped = self.vmm.order(Request::Pause, Vec::new());
        match tokio::time::timeout(STOP_LIMIT, stopped).await {
            Ok(stopped) => Ok(stopped?),
            Err(_) => Err(RestoreError::Late("stopping the vCPUs", STOP_LIMIT).into()),
        }
    }

    /// Its own kernel may still know connections that ended as it was stopped. After a restore the VMM counts its ports anew, and a
    /// connection that meets one of those is reset: the next one has the next port. An order that was heard is not obeyed twice.
    async fn wake(&self, order: Wake) -> Result<Proved, RestoreError> {
        let boot_id = &self.template.kernel_boot_id;
        let mut woken = awaken(&self.vmm, order.clone(), boot_id).await;
        for _ in 1..ATTEMPTS {
            if !(matches!(woken, Err(RestoreError::Agent(AgentError::Wire(_)))) && self.vmm.is_alive()) {
                break;
            }
            woken = order_again(&self.vmm, order.clone(), boot_id).await;
        }
        woken
    }

    /// Lets its vCPUs run, and has it prove that it knows the time and has new entropy.
    pub(super) async fn go(&self) -> Result<(), MachineError> {
        let order = {
            let life = self.life();
            agent::next_life(&life.certificate, life.ordered + 1)?
        };
        self.go_as(order).await
    }

    /// Lets its vCPUs run for the first time, as the child of a moment: it is somebody else.
    pub(super) async fn go_as(&self, order: Wake) -> Result<(), MachineError> {
        let awake = self.wake(order);
        let proved = match tokio::time::timeout(REPAIR_LIMIT, awake).await {
            Ok(proved) => proved?,
            Err(_) => return Err(RestoreError::Late("the proof of a repair", REPAIR_LIMIT).into()),
        };
        let ordered = proved.certificate.generation;
        *self.life() = Life { certificate: proved.certificate, ordered };
        if let Some(place) = &self.kept
            && let Err(error) = kept::note(place, self.vmm.holder(), self.guest())
        {
            // It runs all the same; only a node that has to take it over would know an earlier life of it.
            tracing::warn!(pid = self.vmm.pid(), %error, "what a VM has proved cannot be written down");
        }
        Ok(())
    }
}
