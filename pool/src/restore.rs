//! A VM's way to its request.
//!
//! ```text
//!  restore ──▶ Paused ──wake──▶ Awake ──lease dropped──▶ gone
//!                │                ▲
//!                └─ repair fails ─┴──▶ destroyed, never used
//! ```

use std::{
    fs::File,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::{BoxFuture, FutureExt};
use stasis_guest_wire::AGENT_PORT;
use stasis_vmm_api::{Phases, Reply, Request, RestoreSpec};
use tokio::net::UnixStream;
use uuid::Uuid;

use crate::{
    admission::Reservation,
    agent::{self, AgentError},
    template::{Template, TemplateError},
    vmm::{Spawner, Vmm, VmmError},
};

/// The first life of every VM.
const FIRST_GENERATION: u64 = 1;

/// Why a VM could not be restored or woken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RestoreError {
    /// The template is refused.
    #[error("the template is refused: {0}")]
    Template(#[from] TemplateError),
    /// The VMM process failed.
    #[error("the VM cannot be restored: {0}")]
    Vmm(#[from] VmmError),
    /// The repair failed.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// `/dev/kvm` cannot be opened.
    #[error("{path}: {reason}; see `stasis doctor`")]
    Kvm {
        /// Its path.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The guest did not prove its repair in time.
    #[error("the guest did not prove its repair within {0:?}")]
    Late(Duration),
}

/// `/dev/kvm`, for a VMM process.
pub(crate) fn open_kvm() -> Result<File, RestoreError> {
    let path = PathBuf::from("/dev/kvm");
    File::options()
        .read(true)
        .write(true)
        .open(&path)
        .map_err(|error| RestoreError::Kvm { path, reason: error.to_string() })
}

/// A VM that has never run: restored and paused.
#[derive(Debug)]
pub(crate) struct Paused {
    pub(crate) id: Uuid,
    pub(crate) vmm: Vmm,
    pub(crate) template: Arc<Template>,
    /// From the start of its process to its answer.
    pub(crate) took: Duration,
}

/// A VM that has proved its repair.
#[derive(Debug)]
pub(crate) struct Awake {
    pub(crate) id: Uuid,
    pub(crate) vmm: Vmm,
    pub(crate) template: Arc<Template>,
    pub(crate) stream: UnixStream,
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
}

/// From the template's snapshot, each in a process of its own.
#[derive(Debug)]
pub(crate) struct FromSnapshot {
    /// Where VMM processes come from.
    pub(crate) spawner: Spawner,
}

impl Restore for FromSnapshot {
    fn restore(
        &self,
        template: Arc<Template>,
        reservation: Reservation,
    ) -> BoxFuture<'_, Result<Paused, RestoreError>> {
        restore(&self.spawner, template, reservation).boxed()
    }
}

async fn restore(spawner: &Spawner, template: Arc<Template>, reservation: Reservation) -> Result<Paused, RestoreError> {
    let started = Instant::now();
    let files = template.restore_files()?;
    let kvm = open_kvm()?;
    let (vmm, _) = Vmm::spawn(spawner, &template.machine(), reservation).await?;
    let [root, app] = files.disks;
    let request = Request::Restore(RestoreSpec { machine: template.machine() });
    match vmm.call(request, vec![kvm.into(), files.image, files.state, root, app]).await? {
        Reply::Built(Phases { create, memory, state }) => {
            let took = started.elapsed();
            tracing::debug!(?took, ?create, ?memory, ?state, pid = vmm.pid(), "restored");
            Ok(Paused { id: Uuid::new_v4(), vmm, template, took })
        }
        other => Err(VmmError::Protocol(Box::new(other)).into()),
    }
}

impl Paused {
    /// Lets the VM run, has it repair its identity and checks the proof.
    pub(crate) async fn wake(self, limit: Duration) -> Result<Awake, RestoreError> {
        match tokio::time::timeout(limit, self.wake_unlimited()).await {
            Ok(result) => result,
            Err(_) => Err(RestoreError::Late(limit)),
        }
    }

    async fn wake_unlimited(self) -> Result<Awake, RestoreError> {
        let Self { id, vmm, template, .. } = self;
        let started = Instant::now();
        let identity = agent::new_identity(id, FIRST_GENERATION)?;
        let (mut stream, far) = agent::stream_pair().map_err(|error| VmmError::Failed(error.to_string()))?;
        // All is under way before the guest runs its first instruction: the connection waits in its queue, the message in the socket.
        let connected = vmm.start(Request::Connect { port: AGENT_PORT }, vec![far.into()]).await?;
        let resumed = vmm.start(Request::Resume, Vec::new()).await?;
        connected.done().await?;
        resumed.done().await?;
        let claim = started.elapsed();
        let proof = agent::wake(&mut stream, identity, &template.info().kernel_boot_id);
        let certificate = tokio::select! {
            proof = proof => proof?,
            fate = vmm.ended() => return Err(VmmError::Gone(fate.guest.map(|ended| format!(": {}", ended.why)).unwrap_or_default()).into()),
        };
        let repair = started.elapsed() - claim;
        tracing::debug!(vm = %id, ?claim, ?repair, ?certificate, "awake");
        Ok(Awake { id, vmm, template, stream, claim, repair })
    }
}
