//! What the node can afford. It is promised here before a VM's process starts, and given back after that has ended.
//!
//! ```text
//!  admit ─▶ Reservation: paused ⇄ running ─▶ dropped, when its process is reaped
//!    └─ NoCapacity, at once                    └─ whoever was refused hears of it
//! ```
//! The sums and the one rule are in [`budget`], what paused VMs are expected to write in [`dirty`].

mod budget;
mod dirty;
#[cfg(test)]
mod tests;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use stasis_pool_api::{MemoryCapacity, MemoryForm, NoCapacity, Resource, TemplateInfo, VcpuCapacity};
use tokio::{sync::watch, time::Instant};

use self::budget::{Budget, Image, Urgency};
pub(crate) use self::{
    budget::{Charge, Limits},
    dirty::{Dirty, expected},
};
use crate::{config::Cores, metrics};

/// What a VM costs beside its guest's memory: process, page tables, kernel structures. A paused one's PSS was 2.3 MiB on a busy machine
/// (docs/ARCHITECTURE.md, "What a paused VM costs"); more is kept, since that figure leaves the kernel's share out.
const OVERHEAD: u64 = 8 << 20;

/// How long pools and sandboxes may take to give up what they can spare.
pub(crate) const SPARING: Duration = Duration::from_secs(2);

/// The node's budgets.
#[derive(Debug, Clone)]
pub(crate) struct Admission(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    budget: Mutex<Budget>,
    cores: Cores,
    gauges: metrics::Budgets,
    released: watch::Sender<()>,
    short: watch::Sender<()>,
}

/// What was promised to one VM or process, until dropped.
#[derive(Debug)]
pub(crate) struct Reservation(Promise);

/// The same, for whoever changes what it is: it does not keep it.
#[derive(Debug, Clone)]
pub(crate) struct Promise {
    admission: Admission,
    /// None when it was given back.
    held: Arc<Mutex<Option<Charge>>>,
}

impl Charge {
    /// A process with this much memory, and no vCPU.
    pub(crate) fn process(guest_mib: u32) -> Self {
        Self { committed: (u64::from(guest_mib) << 20) + OVERHEAD, ..Self::default() }
    }

    /// A VM that may run, whose memory is all its own: one that is built, or goes on from what was saved of a sandbox.
    pub(crate) fn alone(guest_mib: u32, vcpus: u8) -> Self {
        Self { vcpus: vcpus.into(), ..Self::process(guest_mib) }
    }

    /// A VM of a template that may run.
    pub(crate) fn running(template: &TemplateInfo) -> Self {
        let spec = &template.spec;
        Self { image: image(template), ..Self::alone(spec.memory_mib(), spec.cpu) }
    }

    /// A VM of a template that stands ready and has not run.
    pub(crate) fn paused(template: &TemplateInfo, p99: Option<u64>) -> Self {
        let guest = u64::from(template.spec.memory_mib()) << 20;
        Self { expected_dirty: expected(p99, guest) + OVERHEAD, image: image(template), ..Self::default() }
    }

    /// Bytes, without the image.
    pub(crate) const fn own_bytes(&self) -> u64 {
        self.committed + self.expected_dirty
    }

    /// Bytes of the image.
    pub(crate) fn image_bytes(&self) -> u64 {
        self.image.as_ref().map_or(0, |image| image.bytes)
    }
}

/// What VMs share in the page cache. What a pager fills counts as the pager's.
fn image(template: &TemplateInfo) -> Option<Image> {
    (template.spec.snapshot.memory == MemoryForm::Raw)
        .then(|| Image { digest: template.digest.as_str().into(), bytes: template.memory_bytes })
}

impl Admission {
    /// With so much memory, and vCPUs for all.
    pub(crate) fn new(memory: u64) -> Self {
        Self::with(memory, Cores { count: u32::MAX, overcommit: 1 })
    }

    pub(crate) fn with(memory: u64, cores: Cores) -> Self {
        let budget = Budget::new(Limits { memory, vcpus: cores.vcpus() });
        let gauges = metrics::Budgets::of(&budget.limits());
        let inner = Inner {
            budget: Mutex::new(budget),
            cores,
            gauges,
            released: watch::Sender::new(()),
            short: watch::Sender::new(()),
        };
        Self(Arc::new(inner))
    }

    fn budget(&self) -> MutexGuard<'_, Budget> {
        self.0.budget.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn exchange(&self, held: &Charge, wanted: &Charge, urgency: Urgency) -> Result<(), NoCapacity> {
        let (done, less) = {
            let mut budget = self.budget();
            let (promised, vcpus) = (budget.promised(), budget.vcpus());
            let done = budget.exchange(held, wanted, urgency);
            self.0.gauges.show(budget.committed(), budget.expected_dirty(), budget.shared(), budget.vcpus());
            (done, budget.promised() < promised || budget.vcpus() < vcpus)
        };
        match &done {
            Ok(()) if less => {
                self.0.released.send_replace(());
            }
            Ok(()) => {}
            Err(refused) => {
                metrics::refused(refused.resource);
                // What stands ready in pools or is suspended has no vCPU that it could spare.
                if refused.resource == Resource::Memory {
                    self.0.short.send_replace(());
                }
            }
        }
        done
    }

    /// Has this for a VM that lives already, however little there is: a node that is started again may have less than before.
    pub(crate) fn admit_living(&self, charge: Charge) -> Reservation {
        // Never refused.
        let _ = self.exchange(&Charge::default(), &charge, Urgency::Living);
        Reservation(Promise { admission: self.clone(), held: Arc::new(Mutex::new(Some(charge))) })
    }

    /// Reserves this, or says at once that it is not there.
    pub(crate) fn admit(&self, charge: Charge) -> Result<Reservation, NoCapacity> {
        self.exchange(&Charge::default(), &charge, Urgency::Start)?;
        Ok(Reservation(Promise { admission: self.clone(), held: Arc::new(Mutex::new(Some(charge))) }))
    }

    /// [`Charge::process`], or says at once that it is not there.
    pub(crate) fn reserve(&self, guest_mib: u32) -> Result<Reservation, NoCapacity> {
        self.admit(Charge::process(guest_mib))
    }

    /// As `admit`, and waits a moment for what others can spare.
    pub(crate) async fn admit_spared(&self, charge: Charge) -> Result<Reservation, NoCapacity> {
        self.retry(Instant::now() + SPARING, || self.admit(charge.clone())).await
    }

    /// Tries until it is done, at every release, or until then.
    async fn retry<T>(&self, until: Instant, attempt: impl Fn() -> Result<T, NoCapacity>) -> Result<T, NoCapacity> {
        let mut releases = self.releases();
        loop {
            match attempt() {
                // More than there is at all does not come by waiting.
                Err(error) if error.needed <= error.limit => {
                    match tokio::time::timeout_at(until, releases.changed()).await {
                        Ok(Ok(())) => {}
                        _ => return Err(error),
                    }
                }
                ended => return ended,
            }
        }
    }

    /// Hears of every reservation that was refused for want of memory: whoever holds what it can spare gives it back.
    pub(crate) fn shortages(&self) -> watch::Receiver<()> {
        self.0.short.subscribe()
    }

    /// Hears of every release.
    pub(crate) fn releases(&self) -> watch::Receiver<()> {
        self.0.released.subscribe()
    }

    /// Waits until nobody holds anything any more, and lets no new one have any.
    pub(crate) async fn all_returned(&self) {
        let mut releases = self.releases();
        self.budget().close();
        while !self.budget().is_unused() {
            if releases.changed().await.is_err() {
                return;
            }
        }
    }

    /// A quarter of the memory is not promised: VMs that nobody has asked for yet take no more than the rest.
    pub(crate) fn is_roomy(&self) -> bool {
        let budget = self.budget();
        budget.free() >= budget.limits().memory / 4
    }

    /// The sums.
    pub(crate) fn capacity(&self) -> (MemoryCapacity, VcpuCapacity) {
        let budget = self.budget();
        let (limits, cores) = (budget.limits(), self.0.cores);
        let memory = MemoryCapacity {
            limit: limits.memory,
            committed: budget.committed(),
            expected_dirty: budget.expected_dirty(),
            shared: budget.shared(),
            free: budget.free(),
            formula: "free = limit - committed - expected_dirty - shared".into(),
        };
        let vcpus = VcpuCapacity {
            cores: cores.count,
            overcommit: cores.overcommit,
            limit: limits.vcpus,
            committed: budget.vcpus(),
            free: limits.vcpus.saturating_sub(budget.vcpus()),
        };
        (memory, vcpus)
    }

    #[cfg(test)]
    pub(crate) fn available_mib(&self) -> u32 {
        u32::try_from(self.budget().free() >> 20).unwrap_or(u32::MAX)
    }
}

impl Reservation {
    /// For whoever changes what is promised.
    pub(crate) fn promise(&self) -> Promise {
        self.0.clone()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(held) = self.0.held().take() {
            // Giving all back is never refused.
            let _ = self.0.admission.exchange(&held, &Charge::default(), Urgency::Start);
        }
    }
}

impl Promise {
    fn held(&self) -> MutexGuard<'_, Option<Charge>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has it be that from now on, or says at once that what is more is not there. One that was given back stays so.
    pub(crate) fn change(&self, wanted: &Charge) -> Result<(), NoCapacity> {
        let mut held = self.held();
        if let Some(held) = held.as_mut() {
            self.admission.exchange(held, wanted, Urgency::Claim)?;
            *held = wanted.clone();
        }
        Ok(())
    }

    /// As `change`, and waits so long. What comes free meanwhile is not given to those who start something new.
    pub(crate) async fn change_within(&self, wanted: &Charge, limit: Duration) -> Result<(), NoCapacity> {
        let Err(_) = self.change(wanted) else { return Ok(()) };
        let more = self.held().as_ref().map_or(0, |held| wanted.own_bytes().saturating_sub(held.own_bytes()));
        let _aside = Aside::new(&self.admission, more);
        self.admission.retry(Instant::now() + limit, || self.change(wanted)).await
    }
}

/// Memory that a claim waits for, until dropped.
struct Aside<'a>(&'a Admission, u64);

impl<'a> Aside<'a> {
    fn new(admission: &'a Admission, bytes: u64) -> Self {
        admission.budget().set_aside(bytes);
        Self(admission, bytes)
    }
}

impl Drop for Aside<'_> {
    fn drop(&mut self) {
        self.0.budget().release_aside(self.1);
        // Those who start something new may have been refused because of it.
        self.0.0.released.send_replace(());
    }
}
