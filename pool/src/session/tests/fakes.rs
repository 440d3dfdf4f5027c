//! VMs of sandboxes that are fakes, and what of them outlives a node.

use std::{
    collections::HashSet,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::{BoxFuture, FutureExt};
use stasis_guest_wire::wake::{Certificate, Proof, Step};
use stasis_pool_api::{NoCapacity, Resource, SandboxId, TemplateInfo, TemplateName, Tenant};
use stasis_state::{MemoryStore, Process};
use tempfile::TempDir;
use tokio::{runtime::Handle, sync::watch};
use uuid::Uuid;

use super::super::{
    kept::{Guest, Papers, taken_over},
    machine::{Machine, MachineError, Machines, Moment},
};
use crate::{
    admission::{Admission, Charge, Full},
    agent,
    vmm::{
        Place, Vmm,
        fake::{self, Agent},
    },
};

/// What outlives a node that is killed.
#[derive(Debug, Clone)]
pub(super) struct World {
    /// Where fakes live.
    pub(super) runtime: Handle,
    /// Where they are written down.
    pub(super) vms: Arc<TempDir>,
    pub(super) saved: Arc<Mutex<HashSet<SandboxId>>>,
    pub(super) store: Arc<MemoryStore>,
}

impl World {
    pub(super) fn new(runtime: Handle) -> Self {
        let (saved, store) = (Arc::default(), Arc::default());
        Self { runtime, vms: Arc::new(tempfile::tempdir().unwrap()), saved, store }
    }

    pub(super) fn vms(&self) -> &Path {
        self.vms.path()
    }
}

/// Makes fakes, and counts what is done with them.
#[derive(Debug)]
pub(super) struct Fakes {
    pub(super) world: World,
    pub(super) admission: Admission,
    pub(super) restored: AtomicU32,
    /// Children that can still be made.
    pub(super) births: AtomicU32,
    /// By their process ids.
    pub(super) adopted: Mutex<HashSet<u32>>,
    /// Nothing is made, saved or removed while this is so.
    pub(super) held: watch::Sender<bool>,
    /// Those made from now on take a while to stop.
    pub(super) stop_late: AtomicBool,
    /// The functions of those made from now on count what they are asked.
    pub(super) counts: AtomicBool,
    /// Nothing can be saved, nor started in time, while this is so; and how long what was to be started might have waited.
    pub(super) is_full: AtomicBool,
    pub(super) patience: Mutex<Option<Duration>>,
}

/// Who is in a fake.
pub(in crate::session) fn guest() -> Guest {
    let certificate = Certificate {
        generation: 1,
        kernel_boot_id: "template's boot".into(),
        boot_nonce: "nonce".into(),
        hostname: "vm".into(),
        machine_id: "id".into(),
        clock_lag_ns: 0,
        runtimes: 0,
        proofs: Step::ALL.map(|step| Proof { step, took: Duration::ZERO }).to_vec(),
    };
    let template = TemplateInfo {
        spec: stasis_pool_api::TemplateSpec::parse("name='x'\ncommand='y'").unwrap(),
        digest: "d".into(),
        created_at: 1,
        kernel_boot_id: "template's boot".into(),
        build_ms: 0,
        null_request_us: 0,
        memory_bytes: 0,
        made_with: stasis_pool_api::MadeWith::default(),
    };
    Guest::proved(template, certificate)
}

impl Fakes {
    fn machine(&self) -> Machine {
        let agent = match (self.counts.load(SeqCst), self.stop_late.load(SeqCst)) {
            (true, _) => Agent::Counts,
            (_, true) => Agent::StopsLate,
            _ => Agent::Honest,
        };
        let (vmm, _) = fake::start_in(&self.world.runtime, agent, self.admission.reserve(64).unwrap());
        let file = || tempfile::tempfile().unwrap();
        Machine::new(vmm, guest(), [file(), file(), file()])
    }

    fn may_start(&self, patience: Duration) -> Result<(), MachineError> {
        *self.patience.lock().unwrap() = Some(patience);
        if !self.is_full.load(SeqCst) {
            return Ok(());
        }
        let what = NoCapacity { resource: Resource::Starts, needed: 9, available: 8, limit: 4 };
        Err(Full { what, missing: 1, retry_after: Duration::from_secs(3) }.into())
    }

    async fn keep(&self, machine: Machine) -> Result<Machine, MachineError> {
        machine.keep(Place::make(self.world.vms()).unwrap()).await
    }

    async fn not_held(&self) {
        let mut held = self.held.subscribe();
        held.wait_for(|held| !held).await.unwrap();
    }

    fn left(&self) -> Vec<(Place, Papers)> {
        let places = Place::all(self.world.vms()).unwrap().into_iter();
        places.filter_map(|place| Some((place.clone(), place.read().ok()?))).collect()
    }
}

impl Machines for Fakes {
    fn create<'a>(
        &'a self,
        _: &'a Tenant,
        _: &'a TemplateName,
        _: Duration,
    ) -> BoxFuture<'a, Result<Machine, MachineError>> {
        async {
            self.not_held().await;
            self.keep(self.machine()).await
        }
        .boxed()
    }
    fn save<'a>(&'a self, id: &'a SandboxId, _: &'a Machine) -> BoxFuture<'a, Result<(), MachineError>> {
        async {
            self.not_held().await;
            if self.is_full.load(SeqCst) {
                return Err(MachineError::Ended);
            }
            self.world.saved.lock().unwrap().insert(id.clone());
            Ok(())
        }
        .boxed()
    }
    fn restore<'a>(&'a self, id: &'a SandboxId, patience: Duration) -> BoxFuture<'a, Result<Machine, MachineError>> {
        async move {
            self.not_held().await;
            self.may_start(patience)?;
            assert!(self.world.saved.lock().unwrap().contains(id), "nothing was saved");
            self.restored.fetch_add(1, SeqCst);
            let machine = self.machine();
            machine.go().await?;
            self.keep(machine).await
        }
        .boxed()
    }
    fn fork<'a>(
        &'a self,
        machine: &'a Machine,
        _: u32,
        patience: Duration,
    ) -> BoxFuture<'a, Result<Moment, MachineError>> {
        if let Err(full) = self.may_start(patience) {
            return async { Err(full) }.boxed();
        }
        let file = || tempfile::tempfile().unwrap();
        let moment = Moment {
            template: machine.template.clone(),
            image: file(),
            state: file(),
            disk: file(),
            app: file(),
            certificate: machine.certificate(),
        };
        async { Ok(moment) }.boxed()
    }
    fn child<'a>(&'a self, moment: &'a Moment) -> BoxFuture<'a, Result<Machine, MachineError>> {
        async {
            let born = self.births.try_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok();
            if !born {
                return Err(MachineError::Ended);
            }
            let machine = self.machine();
            machine.go_as(agent::new_identity(Uuid::new_v4(), moment.certificate.generation + 1)?).await?;
            self.keep(machine).await
        }
        .boxed()
    }
    fn forget<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, Result<(), MachineError>> {
        async {
            self.not_held().await;
            if self.is_full.load(SeqCst) {
                return Err(MachineError::Ended);
            }
            self.world.saved.lock().unwrap().remove(id);
            Ok(())
        }
        .boxed()
    }
    fn adopt(&self, process: Process) -> BoxFuture<'_, Option<Machine>> {
        async move {
            let (place, papers) = self.left().into_iter().find(|(_, papers)| papers.is(process))?;
            let (holder, guest) = papers.into_parts();
            let born = fake::born(process.pid)?;
            let reservation = self.admission.admit_living(Charge::process(64));
            let (vmm, _, files) = Vmm::adopt(place.clone(), holder, Some(born), reservation).await.unwrap();
            self.adopted.lock().unwrap().insert(process.pid);
            Some(taken_over(vmm, place, guest, files).unwrap())
        }
        .boxed()
    }
    fn end_the_rest(&self) -> BoxFuture<'_, ()> {
        async move {
            for (place, papers) in self.left() {
                let pid = papers.into_parts().0.process.pid;
                if self.adopted.lock().unwrap().contains(&pid) {
                    continue;
                }
                if let Some(mut born) = fake::born(pid) {
                    born.end().await.unwrap();
                }
                place.remove();
            }
        }
        .boxed()
    }
}
