//! What a hibernated sandbox is brought back from: a snapshot of its own, complete, so that its template may change or go.
//!
//! ```text
//! sandboxes/ID/   manifest, memory, state, disk, app     published whole, or not at all
//! ```
//! Memory, root disk and `/app` are clones: they share with the template's whatever the guest has not written.

use std::{
    collections::HashMap,
    fs, io,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};

use futures_util::future::{BoxFuture, FutureExt};
use serde::{Deserialize, Serialize};
use stasis_cow::{CloneError, PublishError, Snapshot, SnapshotError, Staging};
use stasis_guest_wire::wake::Certificate;
use stasis_pool_api::{SandboxId, TemplateInfo, TemplateName, Timestamp};
use stasis_vmm_api::{Reply, Request};

use super::machine::{Machine, MachineError, Machines};
use crate::{
    node::{Templates, take},
    pool::Shared,
    restore::{RestoreError, open_kvm},
    template::{machine, part, reopen},
    vmm::{Spawner, Vmm, VmmError},
};

/// Why a sandbox could not be saved, or what was saved cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SaveError {
    /// A file cannot be cloned.
    #[error(transparent)]
    Clone(#[from] CloneError),
    /// The snapshot cannot be put in its place.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// What lies there is not what was saved.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The manifest's details are not ours.
    #[error("what was saved of the sandbox is not understood: {0}")]
    Details(#[from] serde_json::Error),
    /// A file or folder cannot be used.
    #[error("what was saved of the sandbox cannot be used: {0}")]
    Io(#[from] io::Error),
}

/// In the manifest of what was saved.
#[derive(Debug, Serialize, Deserialize)]
struct Details {
    template: TemplateInfo,
    /// Who the guest is, and which life it has lived.
    certificate: Certificate,
}

/// VMs out of the templates' pools, saved below one folder.
#[derive(Debug)]
pub(crate) struct FromPools {
    pub(crate) templates: Arc<RwLock<Templates>>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) spawner: Spawner,
    pub(crate) folder: PathBuf,
    /// What this process has saved, verified and held open, so that a resume need not read it all again.
    pub(crate) open: Mutex<HashMap<SandboxId, Arc<Snapshot>>>,
}

impl FromPools {
    fn place(&self, id: &SandboxId) -> PathBuf {
        self.folder.join(id.as_str())
    }

    fn open_files(&self) -> std::sync::MutexGuard<'_, HashMap<SandboxId, Arc<Snapshot>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn save(&self, id: &SandboxId, machine: &Machine) -> Result<(), MachineError> {
        self.forget(id).await?;
        let (folder, place) = (self.folder.clone(), self.place(id));
        let file = |file: &fs::File| file.try_clone().map_err(SaveError::Io);
        let (image, disk, app) = (file(&machine.image)?, file(&machine.disk)?, file(&machine.app)?);
        let (staging, memory, state) = blocking(move || {
            let staging = Staging::new(&folder)?;
            // The guest stands still from before this to the end: memory and disks are of one moment.
            let memory = stasis_cow::clone_file(&image, &staging.path(part::MEMORY))?;
            stasis_cow::clone_file(&disk, &staging.path(part::DISK))?;
            stasis_cow::clone_file(&app, &staging.path(part::APP))?;
            let state = fs::File::create_new(staging.path(part::STATE))?;
            Ok((staging, memory, state))
        })
        .await?;
        match machine.vmm.call(Request::Snapshot, vec![memory.into(), state.into()]).await? {
            Reply::Snapshotted(report) => tracing::debug!(sandbox = %id, ?report, "saved"),
            other => return Err(VmmError::Protocol(Box::new(other)).into()),
        }
        let details = Details { template: machine.template.clone(), certificate: machine.certificate() };
        let snapshot = blocking(move || {
            let now = Timestamp::now().as_ms() / 1000;
            staging.publish(&place, serde_json::to_value(&details)?, now)?;
            Ok(Snapshot::open(&place)?)
        })
        .await?;
        self.open_files().insert(id.clone(), Arc::new(snapshot));
        Ok(())
    }

    async fn restore(&self, id: &SandboxId) -> Result<Machine, MachineError> {
        let known = self.open_files().get(id).cloned();
        let (snapshot, place) = match known {
            Some(snapshot) => (snapshot, self.place(id)),
            None => {
                let place = self.place(id);
                let there = place.clone();
                let snapshot = Arc::new(blocking(move || Ok(Snapshot::open(&there)?)).await?);
                self.open_files().insert(id.clone(), Arc::clone(&snapshot));
                (snapshot, place)
            }
        };
        let details: Details =
            serde_json::from_value(snapshot.manifest().details.clone()).map_err(SaveError::Details)?;
        let spec = &details.template.spec;
        let reservation = self.shared.admission.reserve_spared(spec.memory_mib()).await?;
        // The semaphores are never closed.
        let _turn = self.shared.restores.acquire().await;
        let part = |name| snapshot.part(name).map_err(SaveError::Snapshot);
        let state = reopen(part(part::STATE)?).map_err(SaveError::Io)?;
        let disk = stasis_cow::clone_nameless(part(part::DISK)?, &place).map_err(SaveError::Clone)?;
        let copy = |file: &fs::File| file.try_clone().map_err(SaveError::Io);
        let (image, app) = (copy(part(part::MEMORY)?)?, copy(part(part::APP)?)?);
        let files = vec![copy(&image)?.into(), state, copy(&disk)?.into(), copy(&app)?.into()];

        let machine = machine(spec);
        let kvm = open_kvm()?;
        let (vmm, _) = Vmm::spawn(&self.spawner, &machine, reservation).await?;
        let prepared = vmm.start(Request::Prepare(machine), vec![kvm.into()]).await?;
        let restored = vmm.start(Request::Restore, files).await?;
        prepared.done().await?;
        match restored.wait().await? {
            Reply::Built(phases) => tracing::debug!(sandbox = %id, ?phases, pid = vmm.pid(), "restored"),
            other => return Err(VmmError::Protocol(Box::new(other)).into()),
        }
        let machine = Machine::new(vmm, details.template, [image, disk, app], details.certificate);
        let _turn = self.shared.wakes.acquire().await;
        machine.go().await?;
        Ok(machine)
    }

    async fn forget(&self, id: &SandboxId) -> Result<(), MachineError> {
        self.open_files().remove(id);
        let place = self.place(id);
        blocking(move || match fs::remove_dir_all(place) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        })
        .await
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SaveError> + Send + 'static,
) -> Result<T, MachineError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| RestoreError::from(VmmError::Failed(error.to_string())))?.map_err(MachineError::from)
}

impl Machines for FromPools {
    fn create<'a>(
        &'a self,
        template: &'a TemplateName,
        budget: Duration,
    ) -> BoxFuture<'a, Result<Machine, MachineError>> {
        async move { Machine::of(take(&self.templates, template, budget).await?) }.boxed()
    }

    fn save<'a>(&'a self, id: &'a SandboxId, machine: &'a Machine) -> BoxFuture<'a, Result<(), MachineError>> {
        Self::save(self, id, machine).boxed()
    }

    fn restore<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, Result<Machine, MachineError>> {
        Self::restore(self, id).boxed()
    }

    fn forget<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, Result<(), MachineError>> {
        Self::forget(self, id).boxed()
    }
}
