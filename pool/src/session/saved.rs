//! What a hibernated sandbox is brought back from: a snapshot of its own, complete, so that its template may change or go.
//!
//! ```text
//! sandboxes/ID/   manifest, memory, state, disk, app     published whole, or not at all
//! ```
//! Memory, root disk and `/app` are clones: they share with the template's whatever the guest has not written.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::future::{BoxFuture, FutureExt};
use serde::{Deserialize, Serialize};
use stasis_cow::{CloneError, PublishError, Snapshot, SnapshotError, Staging};
use stasis_guest_wire::wake::Certificate;
use stasis_pool_api::{SandboxId, TemplateInfo, TemplateName, Tenant, Timestamp};
use stasis_state::Process;
use stasis_vmm_api::{Reply, Request};
use tokio::time::Instant;
use uuid::Uuid;

use super::{
    kept::{Guest, Survivors},
    machine::{Adopting, Machine, MachineError, Machines, Moment},
};
use crate::{
    admission::Charge,
    agent,
    pool::Shared,
    pools::Pools,
    restore::{RestoreError, born, open_kvm},
    template::{machine, part, reopen},
    vmm::{Place, Spawner, VmmError},
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
    pub(crate) pools: Arc<Pools>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) spawner: Spawner,
    pub(crate) folder: PathBuf,
    /// What this process has saved, verified and held open, so that a resume need not read it all again.
    pub(crate) open: Mutex<HashMap<SandboxId, Arc<Snapshot>>>,
    /// Those VMs that outlived an earlier process, and where this one's are written down.
    pub(crate) survivors: Survivors,
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
        let (image, disk, app) = (copy(&machine.image)?, copy(&machine.disk)?, copy(&machine.app)?);
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

    async fn restore(&self, id: &SandboxId, patience: Duration) -> Result<Machine, MachineError> {
        self.shared.can_start(1, patience)?;
        let until = Instant::now() + patience;
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
        let part = |name| snapshot.part(name).map_err(SaveError::Snapshot);
        let parts = Parts {
            image: part(part::MEMORY)?,
            state: part(part::STATE)?,
            disk: part(part::DISK)?,
            app: part(part::APP)?,
        };
        let machine = self.build(details.template, &parts, &place, details.certificate, until).await?;
        let _turn = self.shared.turn_to_wake(until).await?;
        machine.go().await?;
        self.keep(machine).await
    }

    /// Has a VM outlive this process, should that be killed.
    async fn keep(&self, machine: Machine) -> Result<Machine, MachineError> {
        machine.keep(Place::make(self.survivors.root()).map_err(MachineError::Keep)?).await
    }

    async fn fork(&self, machine: &Machine, children: u32, patience: Duration) -> Result<Moment, MachineError> {
        let until = Instant::now() + patience;
        self.shared.can_start(children, patience)?;
        let (image, app, folder) = (copy(&machine.image)?, copy(&machine.app)?, self.folder.clone());
        let [image, state, disk] = blocking(move || {
            let image = stasis_cow::clone_nameless(&image, &folder)?;
            Ok([image, stasis_cow::nameless(&folder)?, stasis_cow::nameless(&folder)?])
        })
        .await?;
        let certificate = machine.certificate();
        let files = vec![copy(&image)?.into(), copy(&state)?.into(), copy(&disk)?.into()];
        let report = machine.vmm.live_snapshot(files).await?;
        tracing::info!(?report, pid = machine.vmm.pid(), "forked");
        Ok(Moment { template: machine.template.clone(), image, state, disk, app, certificate, until })
    }

    async fn child(&self, moment: &Moment) -> Result<Machine, MachineError> {
        let Moment { template, image, state, disk, app, certificate, until } = moment;
        let order = agent::new_identity(Uuid::new_v4(), certificate.generation + 1)?;
        let parts = Parts { image, state, disk, app };
        let machine = self.build(template.clone(), &parts, &self.folder, certificate.clone(), *until).await?;
        let _turn = self.shared.turn_to_wake(*until).await?;
        machine.go_as(order).await?;
        self.keep(machine).await
    }

    /// A paused VM of these files, the disk a clone of its own in the file system of `folder`. It waits for memory that is on its way back and
    /// for its turn, if need be until then.
    async fn build(
        &self,
        template: TemplateInfo,
        parts: &Parts<'_>,
        folder: &Path,
        certificate: Certificate,
        until: Instant,
    ) -> Result<Machine, MachineError> {
        let charge = Charge::alone(template.spec.memory_mib(), template.spec.cpu);
        let reservation = self.shared.admission.admit_returning(charge, Some(until)).await?;
        let _turn = self.shared.turn_to_start(until).await?;
        let state = reopen(parts.state).map_err(SaveError::Io)?;
        let disk = stasis_cow::clone_nameless(parts.disk, folder).map_err(SaveError::Clone)?;
        let (image, app) = (copy(parts.image)?, copy(parts.app)?);
        let files = vec![copy(&image)?.into(), copy(&disk)?.into(), copy(&app)?.into()];

        let for_shell = vec![open_kvm()?.into(), state];
        let vmm = born(&self.spawner, machine(&template.spec), reservation, for_shell, files).await?;
        Ok(Machine::new(vmm, Guest::proved(template, certificate), [image, disk, app]))
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

/// The files that a VM is made from.
struct Parts<'a> {
    image: &'a fs::File,
    state: &'a fs::File,
    disk: &'a fs::File,
    app: &'a fs::File,
}

fn copy(file: &fs::File) -> Result<fs::File, SaveError> {
    file.try_clone().map_err(SaveError::Io)
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
        tenant: &'a Tenant,
        template: &'a TemplateName,
        budget: Duration,
    ) -> BoxFuture<'a, Result<Machine, MachineError>> {
        async move { self.keep(Machine::of(self.pools.take(tenant, template, budget).await?)?).await }.boxed()
    }

    fn save<'a>(&'a self, id: &'a SandboxId, machine: &'a Machine) -> BoxFuture<'a, Result<(), MachineError>> {
        Self::save(self, id, machine).boxed()
    }

    fn restore<'a>(&'a self, id: &'a SandboxId, patience: Duration) -> BoxFuture<'a, Result<Machine, MachineError>> {
        Self::restore(self, id, patience).boxed()
    }

    fn fork<'a>(
        &'a self,
        machine: &'a Machine,
        children: u32,
        patience: Duration,
    ) -> BoxFuture<'a, Result<Moment, MachineError>> {
        Self::fork(self, machine, children, patience).boxed()
    }

    fn child<'a>(&'a self, moment: &'a Moment) -> BoxFuture<'a, Result<Machine, MachineError>> {
        Self::child(self, moment).boxed()
    }

    fn forget<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, Result<(), MachineError>> {
        Self::forget(self, id).boxed()
    }

    fn adopt(&self, process: Process, given_up: BoxFuture<'static, ()>) -> Adopting<'_> {
        self.survivors.adopt(process, given_up).boxed()
    }

    fn end(&self, process: Process) -> BoxFuture<'_, Result<(), MachineError>> {
        self.survivors.end(process).boxed()
    }

    fn fault(&self, process: Process) -> Option<String> {
        self.survivors.fault(process)
    }

    fn end_the_rest(&self, named: Vec<Process>) -> BoxFuture<'_, ()> {
        self.survivors.end_the_rest(named).boxed()
    }

    fn leave_the_rest(&self) -> Vec<Process> {
        self.survivors.leave()
    }
}
