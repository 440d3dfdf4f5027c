//! What a pool's task knows. Tenants are those of the operator's file, so their number is bounded.

use metrics::{
    Counter, Gauge, Histogram, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use stasis_pool_api::{BoundBy, ClaimError, PoolStatus, StartKind, TemplateName, Tenant, Timings};

const CLAIMS: &str = "stasis_pool_claims_total";
const CLAIM_SECONDS: &str = "stasis_pool_claim_seconds";
const BOUND: &str = "stasis_pool_bound";
const EVICTED: &str = "stasis_pool_evicted_total";
const HOT_CHECKS: &str = "stasis_pool_hot_checks_total";
const REFILL_RATE: &str = "stasis_pool_refill_per_second";
const OFFERED_LOAD: &str = "stasis_pool_offered_load";

/// Gauges that are numbers of the status as they are.
type Number = (&'static str, &'static str, fn(&PoolStatus) -> u32);
const NUMBERS: [Number; 9] = [
    ("stasis_pool_target", "VMs that the pool wants ready, paused and hot.", |pool| pool.target),
    ("stasis_pool_ready", "VMs that are restored and paused.", |pool| pool.ready),
    ("stasis_pool_hot", "VMs that run, have proved their repair and wait for a request.", |pool| pool.hot),
    ("stasis_pool_restoring", "VMs that are being restored.", |pool| pool.restoring),
    ("stasis_pool_rewinding", "Used VMs that are being brought back to the snapshot.", |pool| pool.rewinding),
    ("stasis_pool_warming", "VMs that are being made hot.", |pool| pool.warming),
    ("stasis_pool_claimed", "VMs that somebody has.", |pool| pool.claimed),
    ("stasis_pool_refill_backlog", "VMs that are wanted, ready or by claims that wait, and are not ready.", backlog),
    ("stasis_pool_waiting", "Claims that wait for a VM.", |pool| pool.waiting),
];

const fn backlog(pool: &PoolStatus) -> u32 {
    (pool.target + pool.waiting).saturating_sub(pool.ready + pool.hot)
}

const BOUNDS: [(BoundBy, &str); 5] = [
    (BoundBy::Max, "max"),
    (BoundBy::MaxMemory, "max_memory"),
    (BoundBy::NodeMemory, "node_memory"),
    (BoundBy::Idle, "idle"),
    (BoundBy::Failures, "failures"),
];

pub(super) fn describe() {
    describe_counter!(
        CLAIMS,
        "Claims, by how they ended: hot and hit (a hot, a paused VM stood ready), waited, exhausted, concurrency, failed."
    );
    describe_histogram!(CLAIM_SECONDS, "From a claim's start to a VM that has proved its repair.");
    for (name, help, _) in NUMBERS {
        describe_gauge!(name, help);
    }
    describe_gauge!(BOUND, "1 for what keeps a pool from having, or wanting, what its settings ask for.");
    describe_counter!(
        EVICTED,
        "VMs that left a pool without having served: surplus (more than it keeps), ended (the process did), disconnected (the \
         function closed a hot VM's connection), unanswered (a hot VM's agent did not answer), room (a claim had another that could not run for want of memory)."
    );
    describe_counter!(
        HOT_CHECKS,
        "Questions to agents of hot VMs whether they are there, by result: answered, destroyed."
    );
    describe_gauge!(REFILL_RATE, "VMs that became ready per second lately, while some were wanted.");
    describe_gauge!(
        OFFERED_LOAD,
        "VMs that the pool's claims keep from the next, on average lately: claimed, waited for, or on their way back from a claim."
    );
}

/// A template's claims that got a VM, each series looked up once: they are counted while a caller waits.
#[derive(Clone)]
pub(crate) struct Claims {
    hot: Counter,
    hit: Counter,
    waited: Counter,
    seconds: Histogram,
}

impl std::fmt::Debug for Claims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Claims").finish_non_exhaustive()
    }
}

impl Claims {
    pub(crate) fn of(template: &TemplateName) -> Self {
        let counter = |result: &'static str| counter!(CLAIMS, "template" => template.to_string(), "result" => result);
        let seconds = histogram!(CLAIM_SECONDS, "template" => template.to_string());
        Self { hot: counter("hot"), hit: counter("hit"), waited: counter("waited"), seconds }
    }

    pub(crate) fn add(&self, start: StartKind, timings: &Timings) {
        match start {
            StartKind::Hot => &self.hot,
            StartKind::Paused => &self.hit,
            StartKind::Cold | StartKind::Running | StartKind::Resumed => &self.waited,
        }
        .increment(1);
        let total = timings.queue + timings.claim + timings.restore + timings.repair;
        self.seconds.record(total.as_secs_f64());
    }
}

pub(crate) fn claim_failed(template: &TemplateName, error: &ClaimError) {
    let result = match error {
        ClaimError::Exhausted { .. } => "exhausted",
        ClaimError::Concurrency { .. } => "concurrency",
        ClaimError::NoCapacity { .. } => "no_capacity",
        ClaimError::Broken { .. } | ClaimError::UnknownTemplate(_) => "failed",
    };
    counter!(CLAIMS, "template" => template.to_string(), "result" => result).increment(1);
}

/// Why a VM left its pool without having served.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Eviction {
    Surplus,
    Ended,
    Disconnected,
    Unanswered,
    Room,
}

pub(crate) fn evicted(template: &TemplateName, why: Eviction, vms: u64) {
    let reason = match why {
        Eviction::Surplus => "surplus",
        Eviction::Ended => "ended",
        Eviction::Disconnected => "disconnected",
        Eviction::Unanswered => "unanswered",
        Eviction::Room => "room",
    };
    if vms > 0 {
        counter!(EVICTED, "template" => template.to_string(), "reason" => reason).increment(vms);
    }
}

pub(crate) fn hot_vm_asked(template: &TemplateName, answer: Result<(), &str>) {
    let result = match answer {
        Ok(()) => "answered",
        Err(reason) => {
            tracing::error!(%template, reason, "a hot VM is replaced");
            "destroyed"
        }
    };
    counter!(HOT_CHECKS, "template" => template.to_string(), "result" => result).increment(1);
}

/// The gauges of one pool, each looked up once: they are set whenever anything happens to it, and that is while a claim waits.
pub(crate) struct Gauges {
    numbers: [Gauge; NUMBERS.len()],
    refill_rate: Gauge,
    offered_load: Gauge,
    bounds: [Gauge; BOUNDS.len()],
}

impl Gauges {
    pub(crate) fn of(tenant: &Tenant, template: &TemplateName) -> Self {
        let labels = [("template", template.to_string()), ("tenant", tenant.to_string())];
        let bound_by = |by: &str| {
            let [template, tenant] = labels.clone();
            gauge!(BOUND, &[template, tenant, ("by", by.to_owned())])
        };
        Self {
            numbers: NUMBERS.map(|(name, ..)| gauge!(name, &labels)),
            refill_rate: gauge!(REFILL_RATE, &labels),
            offered_load: gauge!(OFFERED_LOAD, &labels),
            bounds: BOUNDS.map(|(_, by)| bound_by(by)),
        }
    }

    pub(crate) fn set(&self, status: &PoolStatus) {
        for (gauge, (_, _, number)) in self.numbers.iter().zip(NUMBERS) {
            gauge.set(f64::from(number(status)));
        }
        self.refill_rate.set(status.refill_per_s.unwrap_or_default());
        self.offered_load.set(status.offered_load);
        for (gauge, (bound, _)) in self.bounds.iter().zip(BOUNDS) {
            gauge.set(f64::from(u8::from(status.bound_by == Some(bound))));
        }
    }
}
