//! One template's VMs.
//!
//! ```text
//!   refill ──▶ restoring ──▶ ready ──claim──▶ claimed ──lease dropped──▶ rewinding ──▶ ready
//!                  │           │ (its process dies: gone)                   │ (not wanted, or it fails: gone)
//!                  └─ fails ─▶ the oldest waiter hears why
//! ```
//!
//! One task ([`actor`]) owns the counts and queues; everything reaches it as a message, so no two claims can take one VM, and the
//! claim that takes one is also what starts its replacement. A claim that finds none ready waits, and the next VM that becomes
//! ready is its own.

mod actor;
mod backoff;
#[cfg(test)]
mod tests;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use stasis_guest_wire::wake::Certificate;
use stasis_pool_api::{Claim, ClaimError, Lease, PoolStatus, StartKind, TemplateInfo, TemplateName, Timings};
use tokio::{
    net::UnixStream,
    sync::{Semaphore, mpsc, oneshot},
};

use crate::{
    admission::{Admission, SPARING},
    metrics,
    restore::{Awake, Paused, Restore, RestoreError, Slot},
    template::Template,
};

/// VMs that a claim may go through before it gives up on the template.
const ATTEMPTS: u32 = 3;
/// Longest time that a woken guest may take to prove its repair.
const REPAIR_LIMIT: Duration = Duration::from_secs(20);
/// How long a failed function's guest is given to end before its console is read for the log.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What all pools of a node share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Where VMs come from.
    pub(crate) source: Box<dyn Restore>,
    pub(crate) admission: Admission,
    pub(crate) restores: Arc<Semaphore>,
    /// Repairs at a time. A repair is all processor time: more at once than there are processors make each other late, the more so where a
    /// guest's own clock ticks cost as much as its work (docs/operations.md, "Limits").
    pub(crate) wakes: Arc<Semaphore>,
    /// Takes templates that were made for another kind of host and must be built again.
    pub(crate) outgrown: mpsc::UnboundedSender<Arc<Template>>,
}

impl PartialEq for Pool {
    /// Whether they are the same pool.
    fn eq(&self, other: &Self) -> bool {
        self.messages.same_channel(&other.messages)
    }
}

/// A pool's address.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    messages: mpsc::UnboundedSender<Message>,
    template: Arc<Template>,
    wakes: Arc<Semaphore>,
}

enum Message {
    Claim(oneshot::Sender<Answer>),
    Restored(Box<Result<Paused, RestoreError>>),
    /// A claimed VM has done its work.
    Used(Box<Slot>),
    Rewound(Box<Result<Paused, RestoreError>>),
    /// A claimed VM's ticket was dropped.
    Released,
    /// A woken VM has proved its repair.
    Proved,
    /// A woken VM did not prove its repair.
    Unproved(String),
    /// The process of a VM that was ready once has ended.
    Died(uuid::Uuid),
    Status(oneshot::Sender<PoolStatus>),
    Drain,
}

type Answer = Result<Grant, String>;

/// A VM that was taken from the pool.
struct Grant {
    vm: Paused,
    start: StartKind,
    ticket: Ticket,
}

/// Counts as a claimed VM until dropped.
struct Ticket(mpsc::UnboundedSender<Message>);

impl Drop for Ticket {
    fn drop(&mut self) {
        // A drained pool counts no more.
        let _ = self.0.send(Message::Released);
    }
}

impl Pool {
    /// Starts a pool, which begins to fill itself.
    pub(crate) fn start(template: Arc<Template>, shared: Arc<Shared>) -> Self {
        let wakes = Arc::clone(&shared.wakes);
        let messages = actor::start(Arc::clone(&template), shared);
        Self { messages, template, wakes }
    }

    pub(crate) fn template(&self) -> &Arc<Template> {
        &self.template
    }

    /// Ready VMs end; claimed ones finish; waiters are sent away.
    pub(crate) fn drain(&self) {
        let _ = self.messages.send(Message::Drain);
    }

    pub(crate) async fn status(&self) -> Option<PoolStatus> {
        let (reply, status) = oneshot::channel();
        self.messages.send(Message::Status(reply)).ok()?;
        status.await.ok()
    }

    /// Takes a VM for one request, within `budget`.
    #[cfg(test)]
    pub(crate) async fn claim(&self, budget: Duration) -> Result<Claim, ClaimError> {
        self.take(budget).await.map(Claim::from)
    }

    /// Takes a VM and wakes it, within `budget`.
    pub(crate) async fn take(&self, budget: Duration) -> Result<Taken, ClaimError> {
        let name = &self.template.info().spec.name;
        let claimed = self.claim_unmeasured(name, budget).await;
        match &claimed {
            Ok(taken) => metrics::claimed(name, taken.start, &taken.timings),
            Err(_) => metrics::claim_failed(name),
        }
        claimed
    }

    async fn claim_unmeasured(&self, name: &TemplateName, budget: Duration) -> Result<Taken, ClaimError> {
        let started = Instant::now();
        let mut reason = String::new();
        for _ in 0..ATTEMPTS {
            let left = budget.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Err(self.exhausted(name, started.elapsed()).await);
            }
            let (reply, answer) = oneshot::channel();
            let unknown = || ClaimError::UnknownTemplate(name.clone());
            self.messages.send(Message::Claim(reply)).map_err(|_| unknown())?;
            let grant = match self.granted(name, answer, left).await? {
                Ok(Ok(Ok(grant))) => grant,
                Ok(Ok(Err(why))) => {
                    reason = why;
                    continue;
                }
                Ok(Err(_)) => return Err(unknown()),
                Err(_) => return Err(self.exhausted(name, started.elapsed()).await),
            };
            let left = budget.saturating_sub(started.elapsed());
            // One that the node has no room to run goes: others are short of what it has.
            let full = |full| ClaimError::NoCapacity { template: name.clone(), full };
            grant.vm.slot.may_run(left).await.map_err(full)?;
            let turn = Arc::clone(&self.wakes).acquire_owned();
            let Ok(turn) = tokio::time::timeout(budget.saturating_sub(started.elapsed()), turn).await else {
                return Err(self.exhausted(name, started.elapsed()).await);
            };
            let waited = started.elapsed();
            let restore = match grant.start {
                StartKind::Paused => Duration::ZERO,
                _ => grant.vm.took.min(waited),
            };
            let limit = budget.saturating_sub(waited).min(REPAIR_LIMIT);
            // In a task of its own: a caller who leaves meanwhile has its VM come back by the lease, and be rewound.
            let pool = self.clone();
            let waking = tokio::spawn(async move {
                let awake = grant.vm.wake(limit).await?;
                drop(turn);
                Ok(pool.lease_out(awake, grant.ticket, grant.start, waited - restore, restore))
            });
            let woken = waking
                .await
                .map_err(|error| ClaimError::Broken { template: name.clone(), reason: error.to_string() })?;
            match woken {
                Ok(claim) => {
                    let _ = self.messages.send(Message::Proved);
                    return Ok(claim);
                }
                // The caller's patience was shorter than the VM's time: no failure of the template's.
                Err(RestoreError::Late(..)) if limit < REPAIR_LIMIT => {
                    return Err(self.exhausted(name, started.elapsed()).await);
                }
                Err(error) => {
                    reason = error.to_string();
                    tracing::error!(template = %name, %error, "a VM was destroyed because it did not prove its repair");
                    let _ = self.messages.send(Message::Unproved(reason.clone()));
                }
            }
        }
        Err(ClaimError::Broken { template: name.clone(), reason })
    }

    /// Waits for an answer. Where the pool has no VM at all, and the node no room for one, even after others have given up what they can
    /// spare, none is waited for.
    async fn granted(
        &self,
        name: &TemplateName,
        mut answer: oneshot::Receiver<Answer>,
        limit: Duration,
    ) -> Result<Result<Result<Answer, oneshot::error::RecvError>, tokio::time::error::Elapsed>, ClaimError> {
        let first = tokio::time::timeout(limit.min(SPARING), &mut answer).await;
        if first.is_ok() || limit <= SPARING {
            return Ok(first);
        }
        match self.status().await {
            Some(PoolStatus { short_of: Some(full), ready: 0, restoring: 0, rewinding: 0, claimed: 0, .. }) => {
                Err(ClaimError::NoCapacity { template: name.clone(), full })
            }
            _ => Ok(tokio::time::timeout(limit - SPARING, answer).await),
        }
    }

    fn lease_out(&self, awake: Awake, ticket: Ticket, start: StartKind, queue: Duration, restore: Duration) -> Taken {
        let Awake { id, slot, stream, certificate, claim, repair } = awake;
        let template = slot.template.info().clone();
        let lease = VmLease { id, slot: Mutex::new(Some(slot)), pool: self.messages.clone(), _ticket: ticket };
        Taken { template, start, timings: Timings { queue, claim, restore, repair }, stream, certificate, lease }
    }

    async fn exhausted(&self, name: &TemplateName, waited: Duration) -> ClaimError {
        let status = self.status().await;
        let max = self.template.info().spec.pool.max;
        let (bound, ahead) = match &status {
            Some(status) if status.vms() >= max => {
                (format!("all {max} VMs that pool.max allows are in use"), status.waiting)
            }
            Some(status) => match &status.last_failure {
                Some(failure) => (format!("the last restore failed: {failure}"), status.waiting),
                None => match &status.short_of {
                    Some(full) => (full.to_string(), status.waiting),
                    None => ("restores or repairs are slow: others wait their turn too".into(), status.waiting),
                },
            },
            None => ("the pool is being drained".into(), 0),
        };
        // Each claimed VM that ends lets one waiter in, after a restore; a second per place is the floor that HTTP can express.
        let retry_after = Duration::from_secs(u64::from(ahead / max.max(1)) + 1);
        ClaimError::Exhausted { template: name.clone(), waited, bound, retry_after }
    }
}

/// A VM that was taken, woken and proved. Dropping it gives the VM back.
pub(crate) struct Taken {
    template: TemplateInfo,
    start: StartKind,
    timings: Timings,
    stream: UnixStream,
    certificate: Certificate,
    lease: VmLease,
}

impl Taken {
    /// Takes the VM out of its pool for good: it no longer counts as claimed, and never comes back.
    pub(crate) fn keep(self) -> Option<(Slot, Certificate)> {
        self.lease.take().map(|slot| (slot, self.certificate))
    }
}

impl From<Taken> for Claim {
    fn from(taken: Taken) -> Self {
        let Taken { template, start, timings, stream, lease, .. } = taken;
        Self { vm: lease.id, template, start, timings, stream: Box::new(stream), lease: Box::new(lease) }
    }
}

/// Ownership of a claimed VM.
struct VmLease {
    id: uuid::Uuid,
    /// Until it has been given back, or away.
    slot: Mutex<Option<Slot>>,
    pool: mpsc::UnboundedSender<Message>,
    _ticket: Ticket,
}

impl VmLease {
    fn take(&self) -> Option<Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Lease for VmLease {
    fn report_failure(&self, request: &str, reason: &str) {
        let (Some(slot), vm) = (self.take(), self.id) else { return };
        let (request, reason) = (request.to_owned(), reason.to_owned());
        // The task keeps the VM until its console is read: a function that died took the guest's last words with it a moment ago. A VM
        // that failed is not used again.
        tokio::spawn(async move {
            let template = &slot.template.info().spec.name;
            let _ = tokio::time::timeout(LAST_WORDS, slot.vmm.ended()).await;
            // A process that answers nothing has no last words, and must go all the same.
            let console = tokio::time::timeout(LAST_WORDS, slot.vmm.console()).await.unwrap_or_default();
            tracing::warn!(%template, %vm, %request, reason, console, "the function broke a request off");
        });
    }
}

impl Drop for VmLease {
    fn drop(&mut self) {
        if let Some(slot) = self.take().filter(|slot| slot.vmm.is_alive()) {
            // A drained pool takes nothing back: the VM ends here.
            let _ = self.pool.send(Message::Used(Box::new(slot)));
        }
    }
}
