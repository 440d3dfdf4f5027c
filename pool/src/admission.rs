//! What the node can afford. It is promised here before a VM's process starts, and given back after that has ended.
//!
//! ```text
//!  admit ─▶ Reservation: paused ⇄ running ─▶ on its way back ─▶ dropped, when its process is reaped
//!    └─ Full, at once, unless what is on its way back suffices: then its place in the line, until it has come, or does not come
//! ```
//! The sums and the one rule are in [`budget`], what paused VMs are expected to write in [`dirty`], and in [`returns`] how fast things come
//! back, which is when to try again.

mod budget;
mod dirty;
mod line;
mod promise;
mod returns;
#[cfg(test)]
mod tests;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use stasis_pool_api::{MemoryCapacity, MemoryForm, NoCapacity, Resource, RetryRule, TemplateInfo, VcpuCapacity};
use tokio::{sync::watch, time::Instant};

use self::{
    budget::{Amount, Asker, Budget, Holding, Image, Refused},
    returns::{LATEST, Returns, SOONEST},
};
pub(crate) use self::{
    budget::{Charge, Limits},
    dirty::{Dirty, expected},
    line::Place,
    promise::{Promise, Reservation},
    returns::LATELY,
};
use crate::{config::Cores, metrics};

/// What a VM costs beside its guest's memory: process, page tables, kernel structures. A paused one's PSS was 2.3 MiB on a busy machine
/// (docs/ARCHITECTURE.md, "What a paused VM costs"); more is kept, since that figure leaves the kernel's share out.
const OVERHEAD: u64 = 8 << 20;

/// The node has not enough, nor will what is on its way back suffice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub(crate) struct Full {
    /// Of what.
    pub(crate) what: NoCapacity,
    /// How much must come back: bytes, vCPUs or starts.
    pub(crate) missing: u64,
    /// When that may have come back.
    pub(crate) retry_after: Duration,
}

/// The node's budgets.
#[derive(Debug, Clone)]
pub(crate) struct Admission(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    books: Mutex<Books>,
    cores: Cores,
    gauges: metrics::Budgets,
    /// Something came back, or will not: those who wait look again.
    changed: watch::Sender<()>,
    short_of_memory: watch::Sender<()>,
    short: watch::Sender<()>,
}

#[derive(Debug)]
struct Books {
    budget: Budget,
    returns: Returns,
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

    /// The same, and vCPUs.
    const fn amount(&self) -> Amount {
        Amount { bytes: self.own_bytes(), vcpus: self.vcpus }
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
            books: Mutex::new(Books { budget, returns: Returns::new(Instant::now()) }),
            cores,
            gauges,
            changed: watch::Sender::new(()),
            short_of_memory: watch::Sender::new(()),
            short: watch::Sender::new(()),
        };
        Self(Arc::new(inner))
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.0.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn exchange(&self, held: &Holding, wanted: &Holding, asker: Asker) -> Result<(), Refused> {
        let (done, [now, later], [now_before, later_before]) = {
            let mut books = self.books();
            let before = books.budget.promised();
            let done = books.budget.exchange(held, wanted, asker);
            let after = books.budget.promised();
            let returned = before[0].without(after[0]);
            if returned != Amount::default() {
                books.returns.came_back(returned, Instant::now());
            }
            let budget = &books.budget;
            self.0.gauges.show(budget.committed(), budget.expected_dirty(), budget.shared(), after[0].vcpus);
            (done, after, before)
        };
        match &done {
            Ok(()) => {
                let (more, less) = (now.without(now_before), now_before.without(now));
                // What was to come back is not more than was thought, or somebody may wait in vain.
                let hopes_less = later.without(later_before).without(more);
                if less != Amount::default() || hopes_less != Amount::default() {
                    self.stir();
                }
            }
            Err(refused) => {
                metrics::refused(refused.full.resource);
                self.0.short.send_replace(());
                if refused.full.resource == Resource::Memory {
                    self.0.short_of_memory.send_replace(());
                }
            }
        }
        done
    }

    /// Has those who wait look again.
    pub(crate) fn stir(&self) {
        self.0.changed.send_replace(());
    }

    /// A refusal, with when to try again.
    fn full(&self, refused: Refused) -> Full {
        let Refused { full: what, missing, .. } = refused;
        let rates = self.books().returns.per_second(Instant::now());
        let per_second = if what.resource == Resource::Vcpus { rates.vcpus } else { rates.bytes };
        Full { what, missing, retry_after: returns::retry_after(missing, per_second) }
    }

    fn reserved(&self, charge: Charge) -> Reservation {
        Reservation::new(self.clone(), Holding::of(charge))
    }

    /// Has this for a VM that lives already, however little there is: a node that is started again may have less than before.
    pub(crate) fn admit_living(&self, charge: Charge) -> Reservation {
        // Never refused.
        let _ = self.exchange(&Holding::default(), &Holding::of(charge.clone()), Asker::Living);
        self.reserved(charge)
    }

    /// Reserves this, or says at once that it is not there.
    pub(crate) fn admit(&self, charge: Charge) -> Result<Reservation, Full> {
        self.admit_at(None, charge)
    }

    /// As `admit`, at one's place in the line.
    pub(crate) fn admit_at(&self, place: Option<&Place>, charge: Charge) -> Result<Reservation, Full> {
        let asker = place.map_or(Asker::New, Place::asker);
        self.admit_as(asker, charge).map_err(|refused| self.full(refused))
    }

    fn admit_as(&self, asker: Asker, charge: Charge) -> Result<Reservation, Refused> {
        self.exchange(&Holding::default(), &Holding::of(charge.clone()), asker).map(|()| self.reserved(charge))
    }

    /// [`Charge::process`], or says at once that it is not there.
    pub(crate) fn reserve(&self, guest_mib: u32) -> Result<Reservation, Full> {
        self.admit(Charge::process(guest_mib))
    }

    /// As `admit`, and waits in the line while what is on its way back suffices, if need be until then.
    pub(crate) async fn admit_returning(&self, charge: Charge, until: Option<Instant>) -> Result<Reservation, Full> {
        self.in_line(charge.amount(), &mut None, until, || false, |asker| self.admit_as(asker, charge.clone())).await
    }

    /// Whether so many VMs that run can be had, be it when what is on its way has come back. For those who need not have it yet.
    pub(crate) fn foresee(&self, running: &Charge, vms: u32, place: Option<&Place>) -> Result<(), Full> {
        let asker = place.map_or(Asker::New, Place::asker);
        let foreseen = self.books().budget.foresee(running, vms, asker);
        foreseen.map_err(|refused| self.full(refused))
    }

    /// Hears of every reservation that was refused for want of memory: whoever holds some that it can spare gives it back.
    pub(crate) fn shortages_of_memory(&self) -> watch::Receiver<()> {
        self.0.short_of_memory.subscribe()
    }

    /// Hears of every reservation that was refused.
    pub(crate) fn shortages(&self) -> watch::Receiver<()> {
        self.0.short.subscribe()
    }

    /// Hears whenever something has come back, or will not as was thought.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.0.changed.subscribe()
    }

    /// Waits until nobody holds anything any more, and lets no new one have any.
    pub(crate) async fn all_returned(&self) {
        let mut changes = self.changes();
        self.books().budget.close();
        while !self.books().budget.is_unused() {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// A quarter of the memory is not promised: VMs that nobody has asked for yet take no more than the rest.
    pub(crate) fn is_roomy(&self) -> bool {
        let budget = &self.books().budget;
        budget.free() >= budget.limits().memory / 4
    }

    /// The sums.
    pub(crate) fn capacity(&self) -> (MemoryCapacity, VcpuCapacity) {
        let (books, cores) = (self.books(), self.0.cores);
        let (budget, rates) = (&books.budget, books.returns.per_second(Instant::now()));
        let (limits, [now, _]) = (budget.limits(), budget.promised());
        let (returning, waited_for) = (budget.returning(), budget.waited_for());
        let memory = MemoryCapacity {
            limit: limits.memory,
            committed: budget.committed(),
            expected_dirty: budget.expected_dirty(),
            shared: budget.shared(),
            free: budget.free(),
            formula: "free = limit - committed - expected_dirty - shared".into(),
            returning: returning.bytes,
            waited_for: waited_for.bytes,
            returned_per_s: rates.bytes,
        };
        let vcpus = VcpuCapacity {
            cores: cores.count,
            overcommit: cores.overcommit,
            limit: limits.vcpus,
            committed: now.vcpus,
            free: limits.vcpus.saturating_sub(now.vcpus),
            returning: returning.vcpus,
            waited_for: waited_for.vcpus,
            returned_per_s: rates.vcpus,
        };
        (memory, vcpus)
    }

    /// What `retry_after` of a refusal is made of.
    pub(crate) fn retry_rule() -> RetryRule {
        RetryRule {
            formula: "retry_after = (needed - free + waited_for) / returned_per_s, at least min_s, at most max_s"
                .into(),
            lately_s: LATELY.as_secs(),
            min_s: SOONEST.as_secs(),
            max_s: LATEST.as_secs(),
        }
    }

    #[cfg(test)]
    pub(crate) fn available_mib(&self) -> u32 {
        u32::try_from(self.books().budget.free() >> 20).unwrap_or(u32::MAX)
    }
}
