//! One tenant's VMs of one template.
//!
//! ```text
//!   refill ──▶ restoring ──▶ ready: paused [─▶ warming ─▶ hot] ──claim──▶ claimed ──lease dropped──▶ rewinding ──▶ ready
//!                  │           │ (its process dies: gone)                                             │ (not wanted, or it fails: gone)
//!                  └─ fails ─▶ the oldest waiter hears why
//! ```
//!
//! One task ([`actor`]) owns the counts and queues ([`stock`]); everything reaches it as a message, so no two claims can take one VM, and
//! the claim that takes one is also what starts its replacement. A claim that finds none ready waits, and the next VM that becomes
//! ready is its own. A VM never leaves its tenant's pool but to its end, or to become that tenant's sandbox. How many are kept is
//! [`target`]'s to say, and who may use the processors for a restore or a repair that of [`turns`].

mod actor;
mod backoff;
mod fair;
mod grant;
mod hot;
mod lease;
mod load;
mod peak;
mod places;
mod rate;
mod stock;
mod target;
#[cfg(test)]
pub(crate) mod tests;
mod turns;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use stasis_pool_api::{BoundBy, ClaimError, PoolSpec, PoolStatus, Resource, StartKind, TemplateName, Tenant, Timings};
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use self::{
    grant::{Grant, Serving, Ticket},
    hot::Hot,
    lease::VmLease,
    stock::Ready,
};
pub(crate) use self::{
    lease::Taken,
    places::{AllTaken, Place, Places},
    turns::{Flow, Turn, Turns, Urgency},
};
use crate::{
    admission::{Admission, Full},
    metrics::{self, Stage},
    restore::{Awake, Paused, Restore, RestoreError, Slot},
    template::Template,
};

/// VMs that a claim may go through before it gives up on the template.
const ATTEMPTS: u32 = 3;
/// Longest time that a woken guest may take to prove its repair.
const REPAIR_LIMIT: Duration = Duration::from_secs(20);
/// How long a failed function's guest is given to end before its console is read for the log.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A sandbox's share of the turns, as that of a pool whose template says nothing.
pub(crate) const SANDBOX_SHARE: u32 = 100;

/// What all pools of a node share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Where VMs come from.
    pub(crate) source: Box<dyn Restore>,
    pub(crate) admission: Admission,
    /// Restores at a time: more would only slow each other down. All pools share them, by weight.
    pub(crate) restores: Turns,
    /// Repairs at a time. A repair is all processor time: more at once than there are processors make each other late, the more so where a
    /// guest's own clock ticks cost as much as its work (docs/operations.md, "Limits").
    pub(crate) wakes: Turns,
    /// Those of the repairs that no claim waits for: fewer, so that a claim finds a free turn.
    pub(crate) warmings: Turns,
    /// Takes templates that were made for another kind of host and must be built again.
    pub(crate) outgrown: mpsc::UnboundedSender<Arc<Template>>,
}

impl Shared {
    /// Whether so many sandboxes can be brought back or forked within a time, behind all that others have asked for.
    pub(crate) fn can_start(&self, count: u32, within: Duration) -> Result<(), Full> {
        let standing = self.restores.standing(&Flow::new(SANDBOX_SHARE), count as usize);
        standing.is_done_within(within).inspect_err(|full| metrics::refused(full.what.resource))
    }

    /// A sandbox's turn to be restored, for which somebody waits until then.
    pub(crate) async fn turn_to_start(&self, until: tokio::time::Instant) -> Result<Turn, Full> {
        sandbox_turn(&self.restores, until).await
    }

    /// A sandbox's turn to repair itself, for which somebody waits until then.
    pub(crate) async fn turn_to_wake(&self, until: tokio::time::Instant) -> Result<Turn, Full> {
        sandbox_turn(&self.wakes, until).await
    }
}

async fn sandbox_turn(turns: &Turns, until: tokio::time::Instant) -> Result<Turn, Full> {
    let taken = turns.take_by(&Flow::new(SANDBOX_SHARE), Urgency::Claim, until).await;
    taken.inspect_err(|full| metrics::refused(full.what.resource))
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
    wakes: Turns,
    flow: Flow,
    places: Places,
    serving: Serving,
    claims: metrics::Claims,
}

/// Whose pool it is.
#[derive(Debug, Clone)]
pub(crate) struct Tenancy {
    pub(crate) tenant: Tenant,
    /// It was begun by a claim, and ends when it has been idle for long.
    pub(crate) is_begun_by_claim: bool,
}

enum Message {
    /// Somebody who may wait so long.
    Claim(Duration, oneshot::Sender<Answer>),
    Restored(Box<Result<Paused, RestoreError>>),
    /// A VM that was granted to somebody who has not used it, and is claimed no more.
    Untouched(Box<Ready<Paused, Hot>>),
    /// A claim has a VM that cannot run for want of so many bytes: others that stand ready give them up, if they have them.
    MakeRoom(u64, oneshot::Sender<bool>),
    /// A claimed VM has done its work.
    Used(Box<Slot>),
    Rewound(Box<Result<Paused, RestoreError>>),
    /// A VM may be made hot now.
    MayWarm([Turn; 2]),
    Warmed(Box<Result<Hot, RestoreError>>),
    /// The agent of a hot VM has answered, or not; which life it was asked in.
    Asked(Uuid, Result<(), RestoreError>),
    /// A claimed VM's ticket was dropped.
    Released,
    /// A woken VM has proved its repair.
    Proved,
    /// A woken VM did not prove its repair.
    Unproved(String),
    /// The process of a VM that was ready once has ended.
    Died,
    Set(Box<PoolSpec>),
    Status(oneshot::Sender<PoolStatus>),
    Exhausted(oneshot::Sender<(PoolStatus, Duration)>),
    Drain,
}

type Answer = Result<Grant, Refusal>;

/// Why there is no VM for somebody who asked.
#[derive(Debug)]
enum Refusal {
    /// A restore failed.
    Failed(String),
    /// The node has no room for one, or cannot start it in time.
    Full(Full),
}

impl Pool {
    /// Starts a pool, which begins to fill itself.
    pub(crate) fn start(template: Arc<Template>, settings: PoolSpec, tenancy: Tenancy, shared: Arc<Shared>) -> Self {
        let (wakes, flow) = (shared.wakes.clone(), Flow::new(settings.weight));
        let places = Places::new(settings.concurrency);
        let serving = Serving::new(shared.admission.clone());
        let claims = metrics::Claims::of(&template.info().spec.name);
        let messages = actor::start(Arc::clone(&template), settings, tenancy, flow.clone(), shared);
        Self { messages, template, wakes, flow, places, serving, claims }
    }

    /// It takes no more claims: it was drained, or ended because it was idle for long.
    pub(crate) fn has_ended(&self) -> bool {
        self.messages.is_closed()
    }

    /// Places for its tenant's claims.
    pub(crate) const fn places(&self) -> &Places {
        &self.places
    }

    /// Goes on with other settings.
    pub(crate) fn set(&self, settings: PoolSpec) {
        self.places.limit_to(settings.concurrency);
        // One that has ended will be begun with them.
        let _ = self.messages.send(Message::Set(Box::new(settings)));
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
    pub(crate) async fn claim(&self, budget: Duration) -> Result<stasis_pool_api::Claim, ClaimError> {
        self.take(budget).await.map(stasis_pool_api::Claim::from)
    }

    /// Takes a VM and wakes it, within `budget`.
    pub(crate) async fn take(&self, budget: Duration) -> Result<Taken, ClaimError> {
        let name = &self.template.info().spec.name;
        let claimed = self.claim_unmeasured(name, budget).await;
        match &claimed {
            Ok(taken) => self.claims.add(taken.start, &taken.timings),
            Err(error) => metrics::claim_failed(name, error),
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
            self.messages.send(Message::Claim(left, reply)).map_err(|_| unknown())?;
            let grant = match tokio::time::timeout(left, answer).await {
                Ok(Ok(Ok(grant))) => grant,
                Ok(Ok(Err(Refusal::Failed(why)))) => {
                    reason = why;
                    continue;
                }
                Ok(Ok(Err(Refusal::Full(full)))) => return Err(no_capacity(name, full)),
                Ok(Err(_)) => return Err(unknown()),
                Err(_) => return Err(self.exhausted(name, started.elapsed()).await),
            };
            let start = grant.start;
            let turn = match grant.paused() {
                // It has proved its repair, and waits for a request.
                None => None,
                // Until it is woken it goes back as it is if there is no room to run it, its turn does not come, or the caller leaves.
                Some(paused) => {
                    self.may_run(paused, budget.saturating_sub(started.elapsed()))
                        .await
                        .map_err(|full| no_capacity(name, full))?;
                    let turn = self.wakes.take(&self.flow, Urgency::Claim);
                    match tokio::time::timeout(budget.saturating_sub(started.elapsed()), turn).await {
                        Ok(turn) => Some(turn),
                        Err(_) => {
                            drop(grant);
                            return Err(self.exhausted(name, started.elapsed()).await);
                        }
                    }
                }
            };
            let Some((vm, ticket)) = grant.used() else { return Err(unknown()) };
            let waited = started.elapsed();
            let paused = match vm {
                Ready::Hot(Hot { awake, .. }) => {
                    let timings = Timings { queue: waited, ..Timings::default() };
                    return Ok(self.lease_out(awake, ticket, start, timings));
                }
                Ready::Paused(paused) => paused,
            };
            let restore = match start {
                StartKind::Cold => paused.took.min(waited),
                _ => Duration::ZERO,
            };
            let limit = budget.saturating_sub(waited).min(REPAIR_LIMIT);
            // In a task of its own: a caller who leaves meanwhile has its VM come back by the lease, and be rewound.
            let pool = self.clone();
            let waking = tokio::spawn(async move {
                let awake = paused.wake(limit).await?;
                drop(turn);
                let (claim, repair) = (awake.claim, awake.repair);
                metrics::took_until_ready(&pool.template.info().spec.name, Stage::Repair, claim + repair);
                let timings = Timings { queue: waited.saturating_sub(restore), claim, restore, repair };
                Ok(pool.lease_out(awake, ticket, start, timings))
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

    /// Waits until the node has room to run a VM: while that is on its way back, or VMs of this pool serve others, whose end may give it. For
    /// want of memory those that stand ready beside it, which can run no more than it can, are then given up.
    async fn may_run(&self, paused: &Paused, limit: Duration) -> Result<(), Full> {
        let (until, mut place) = (tokio::time::Instant::now() + limit, None);
        loop {
            let refused = match paused.slot.may_run(&mut place, until, || self.serving.is_any()).await {
                Ok(()) => return Ok(()),
                Err(refused) => refused,
            };
            let is_over = tokio::time::Instant::now() >= until;
            if is_over || refused.what.resource != Resource::Memory {
                return Err(refused);
            }
            // Before there is any room, or those that are started anew have it.
            place.get_or_insert_with(|| paused.slot.line_up());
            let (reply, made) = oneshot::channel();
            // A pool that has ended has none.
            let _ = self.messages.send(Message::MakeRoom(refused.missing, reply));
            if !made.await.unwrap_or(false) {
                return Err(refused);
            }
        }
    }

    fn lease_out(&self, awake: Awake, ticket: Ticket, start: StartKind, timings: Timings) -> Taken {
        let Awake { id, slot, stream, certificate, .. } = awake;
        let template = slot.template.info().clone();
        let lease = VmLease::new(id, slot, self.messages.clone(), ticket, self.serving.begins());
        Taken { template, start, timings, stream, certificate, lease }
    }

    async fn exhausted(&self, name: &TemplateName, waited: Duration) -> ClaimError {
        let (reply, status) = oneshot::channel();
        // A pool that has ended answers nothing.
        let _ = self.messages.send(Message::Exhausted(reply));
        let (bound, retry_after) = match status.await {
            Ok((status, retry_after)) => (bound(&status), retry_after),
            Err(_) => ("the pool is being drained".into(), Duration::from_secs(1)),
        };
        ClaimError::Exhausted { template: name.clone(), waited, bound, retry_after }
    }
}

fn no_capacity(name: &TemplateName, full: Full) -> ClaimError {
    ClaimError::NoCapacity { template: name.clone(), full: full.what, retry_after: full.retry_after }
}

/// The limit that is in the way of a pool, in words.
fn bound(status: &PoolStatus) -> String {
    let max = status.settings.max;
    match (status.bound_by, &status.last_failure) {
        (Some(BoundBy::MaxMemory), _) => {
            let most = status.settings.max_memory.unwrap_or_default();
            format!("its VMs have all the memory that pool.max_memory allows, {most}")
        }
        _ if status.vms() >= max => format!("all {max} VMs that pool.max allows are in use"),
        (_, Some(failure)) => format!("the last restore failed: {failure}"),
        (_, None) => match &status.no_capacity {
            Some(full) => full.to_string(),
            None => "restores or repairs are slow: others wait their turn too".into(),
        },
    }
}
