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
use stasis_pool_api::{NoCapacity, Resource, SandboxId, TemplateName, Tenant};
use stasis_state::{MemoryStore, Process};
use tempfile::TempDir;
use tokio::{runtime::Handle, sync::watch};
use uuid::Uuid;

use super::super::{
    kept::{Guest, Papers, taken_over},
    machine::{Adopting, Machine, MachineError, Machines, Moment},
};
use crate::{
    admission::{Admission, Charge, Full},
    agent,
    vmm::{
        Place, Vmm, VmmError,
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
    /// Those that no node can take over, by their process ids.
    pub(super) faulty: Arc<Mutex<HashSet<u32>>>,
    /// Those that do not end, by their process ids.
    pub(super) endless: Arc<Mutex<HashSet<u32>>>,
    pub(super) store: Arc<MemoryStore>,
}

impl World {
    pub(super) fn new(runtime: Handle) -> Self {
        let (saved, store) = (Arc::default(), Arc::default());
        let (faulty, endless) = (Arc::default(), Arc::default());
        Self { runtime, vms: Arc::new(tempfile::tempdir().unwrap()), saved, faulty, endless, store }
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
    pub(super) made: Mutex<HashSet<u32>>,
    /// Nothing is made, saved or removed while this is so.
    pub(super) held: watch::Sender<bool>,
    /// How those behave that are made from now on.
    pub(super) agent: Mutex<Agent>,
    /// Forks, and removing what was saved, do not end.
    pub(super) stuck: AtomicBool,
    /// Nothing can be saved, nor started in time, while this is so; and how long what was to be started might have waited.
    pub(super) is_full: AtomicBool,
    /// Nothing is brought back before those who wait may wait no longer.
    pub(super) is_tardy: AtomicBool,
    pub(super) patience: Mutex<Option<Duration>>,
    /// Why the next one cannot be saved.
    pub(super) unsavable: Mutex<Option<MachineError>>,
    /// Those that no sandbox had taken over when the node left.
    pub(super) overlooked: Mutex<Vec<Process>>,
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
    let template = crate::template::tests::info("name='x'\ncommand='y'");
    Guest::proved(template, certificate)
}

impl Fakes {
    pub(super) async fn machine(&self) -> Result<Machine, MachineError> {
        self.machine_by(None).await
    }

    async fn machine_by(&self, until: Option<tokio::time::Instant>) -> Result<Machine, MachineError> {
        let agent = *self.agent.lock().unwrap();
        let reservation = self.admission.admit_returning(Charge::process(64), until).await?;
        let (vmm, _) = fake::start_in(&self.world.runtime, agent, reservation);
        self.made.lock().unwrap().insert(vmm.pid());
        let file = || tempfile::tempfile().unwrap();
        Ok(Machine::new(vmm, guest(), [file(), file(), file()]))
    }

    async fn not_stuck(&self) {
        if self.stuck.load(SeqCst) {
            std::future::pending().await
        }
    }

    fn may_start(&self, patience: Duration) -> Result<(), MachineError> {
        *self.patience.lock().unwrap() = Some(patience);
        if !self.is_full.load(SeqCst) {
            return Ok(());
        }
        Err(no_turn())
    }

    pub(super) async fn keep(&self, machine: Machine) -> Result<Machine, MachineError> {
        machine.keep(Place::make(self.world.vms()).unwrap()).await
    }

    async fn end_left(&self, process: Process, place: Place) -> Result<(), MachineError> {
        if self.world.endless.lock().unwrap().contains(&process.pid) {
            return Err(MachineError::Lives { why: "told to end".into(), error: std::io::Error::other("told not to") });
        }
        if let Some(mut born) = fake::born(process.pid) {
            born.end().await.unwrap();
        }
        place.remove();
        Ok(())
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

fn no_turn() -> MachineError {
    let what = NoCapacity { resource: Resource::Starts, needed: 9, available: 8, limit: 4 };
    Full { what, missing: 1, retry_after: Duration::from_secs(3) }.into()
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
            self.keep(self.machine().await?).await
        }
        .boxed()
    }
    fn save<'a>(&'a self, id: &'a SandboxId, _: &'a Machine) -> BoxFuture<'a, Result<(), MachineError>> {
        async {
            self.not_held().await;
            if self.is_full.load(SeqCst) {
                return Err(MachineError::Ended);
            }
            if let Some(error) = self.unsavable.lock().unwrap().take() {
                return Err(error);
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
            if self.is_tardy.load(SeqCst) {
                tokio::time::sleep(patience).await;
                return Err(no_turn());
            }
            assert!(self.world.saved.lock().unwrap().contains(id), "nothing was saved");
            self.restored.fetch_add(1, SeqCst);
            let machine = self.machine().await?;
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
            until: tokio::time::Instant::now() + patience,
        };
        async {
            self.not_stuck().await;
            Ok(moment)
        }
        .boxed()
    }
    fn child<'a>(&'a self, moment: &'a Moment) -> BoxFuture<'a, Result<Machine, MachineError>> {
        async {
            let born = self.births.try_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok();
            if !born {
                return Err(MachineError::Ended);
            }
            let machine = self.machine_by(Some(moment.until)).await?;
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
            self.not_stuck().await;
            self.world.saved.lock().unwrap().remove(id);
            Ok(())
        }
        .boxed()
    }
    fn adopt(&self, process: Process, given_up: BoxFuture<'static, ()>) -> Adopting<'_> {
        async move {
            let Some((place, papers)) = self.left().into_iter().find(|(_, papers)| papers.is(process)) else {
                return Ok(None);
            };
            let (holder, guest) = papers.into_parts();
            let Some(born) = fake::born(process.pid) else {
                place.remove();
                return Ok(None);
            };
            let reservation = self.admission.admit_living(Charge::process(64));
            let greeted = tokio::select! {
                greeted = Vmm::greet(&place), if self.fault(process).is_none() => greeted,
                () = given_up => Err(VmmError::Failed("given up".into())),
            };
            match greeted {
                Ok(greeted) => {
                    let (vmm, files) = Vmm::take(greeted, place.clone(), holder, Some(born), reservation);
                    taken_over(vmm, place, guest, files).map(Some)
                }
                Err(error) => {
                    drop(born);
                    self.end_left(process, place).await?;
                    Err(error.into())
                }
            }
        }
        .boxed()
    }
    fn end(&self, process: Process) -> BoxFuture<'_, Result<(), MachineError>> {
        async move {
            let mine = self.made.lock().unwrap().contains(&process.pid);
            match self.left().into_iter().find(|(_, papers)| papers.is(process) && !mine) {
                Some((place, _)) => self.end_left(process, place).await,
                None => Ok(()),
            }
        }
        .boxed()
    }
    fn fault(&self, process: Process) -> Option<String> {
        self.world.faulty.lock().unwrap().contains(&process.pid).then(|| "told to".to_owned())
    }
    fn end_the_rest(&self, named: Vec<Process>) -> BoxFuture<'_, ()> {
        async move {
            for (place, papers) in self.left() {
                let process = papers.into_parts().0.process;
                // Some are of this node already.
                if named.contains(&process) || self.made.lock().unwrap().contains(&process.pid) {
                    continue;
                }
                if let Some(mut born) = fake::born(process.pid) {
                    born.end().await.unwrap();
                }
                place.remove();
            }
        }
        .boxed()
    }
    fn leave_the_rest(&self) -> Vec<Process> {
        self.overlooked.lock().unwrap().clone()
    }
}
