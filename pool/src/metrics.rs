//! The node's metrics. An event emits its log line and its series together.

mod pools;
#[cfg(test)]
mod tests;

use std::time::Duration;

use metrics::{Gauge, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use stasis_pool_api::{Resource, TemplateName};

pub(crate) use self::pools::{Claims, Eviction, Gauges, claim_failed, drained, draining, evicted, hot_vm_asked};
use crate::{admission::Limits, vmm::Footprint};

const REFILLS: &str = "stasis_pool_refill_total";
const REWINDS: &str = "stasis_pool_rewinds_total";
const REWIND_SECONDS: &str = "stasis_pool_rewind_seconds";
const TIME_TO_READY: &str = "stasis_pool_time_to_ready_seconds";
const MEMORY_LIMIT: &str = "stasis_node_memory_limit_bytes";
const MEMORY_COMMITTED: &str = "stasis_node_memory_committed_bytes";
const MEMORY_EXPECTED_DIRTY: &str = "stasis_node_memory_expected_dirty_bytes";
const MEMORY_SHARED: &str = "stasis_node_memory_shared_bytes";
const VCPUS_LIMIT: &str = "stasis_node_vcpus_limit";
const VCPUS_COMMITTED: &str = "stasis_node_vcpus_committed";
const TURNS_LIMIT: &str = "stasis_node_turns_limit";
const TURNS_TAKEN: &str = "stasis_node_turns_taken";
const TURNS_QUEUED: &str = "stasis_node_turns_queued";
const REFUSED: &str = "stasis_admission_refused_total";
const DIRTY: &str = "stasis_vm_dirty_bytes";
const RSS: &str = "stasis_vm_rss_bytes";
const PSS: &str = "stasis_vm_pss_bytes";

/// Says what each series means. Once, after the recorder is installed.
pub(crate) fn describe() {
    crate::session::describe_metrics();
    pools::describe();
    describe_counter!(REFILLS, "Restores, by result.");
    describe_counter!(
        REWINDS,
        "Used VMs brought back to the template's snapshot, by result; one that fails is destroyed."
    );
    describe_histogram!(REWIND_SECONDS, "From a used VM to one that is ready again.");
    describe_histogram!(
        TIME_TO_READY,
        "What it takes until a VM can serve, by stage: turn (waiting for its turn to be restored), restore (from the start of its \
         process to a paused VM), repair (from there to its verified certificate)."
    );
    describe_gauge!(MEMORY_LIMIT, "Memory that the node may promise to VMs.");
    describe_gauge!(MEMORY_COMMITTED, "Memory promised to VMs that run or have run, to builds and to pagers.");
    describe_gauge!(MEMORY_EXPECTED_DIRTY, "Memory promised to VMs that stand ready: what each is expected to write.");
    describe_gauge!(MEMORY_SHARED, "Images that VMs share in the page cache, each once.");
    describe_gauge!(VCPUS_LIMIT, "vCPUs that the node may promise to guests that may run.");
    describe_gauge!(VCPUS_COMMITTED, "vCPUs promised.");
    describe_gauge!(TURNS_LIMIT, "Restores (starts) and repairs at a time.");
    describe_gauge!(TURNS_TAKEN, "Restores (starts) and repairs that are under way.");
    describe_gauge!(TURNS_QUEUED, "Restores (starts) and repairs that wait for their turn.");
    describe_counter!(
        REFUSED,
        "What was refused because the node is full, by what it is short of. A pool that is refused tries again."
    );
    describe_histogram!(RSS, "Memory that a VM's process has mapped, measured when it was restored.");
    describe_histogram!(PSS, "The same, with each page divided by the number of processes that share it.");
    describe_histogram!(DIRTY, "Memory that a life of a VM has written, measured when it is rewound.");
}

/// What a VM goes through until it can serve.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stage {
    Turn,
    Restore,
    Repair,
}

pub(crate) fn took_until_ready(template: &TemplateName, stage: Stage, took: Duration) {
    let stage = match stage {
        Stage::Turn => "turn",
        Stage::Restore => "restore",
        Stage::Repair => "repair",
    };
    histogram!(TIME_TO_READY, "template" => template.to_string(), "stage" => stage).record(took.as_secs_f64());
}

pub(crate) fn restored(template: &TemplateName, took: Result<Duration, &str>) {
    let result = match took {
        Ok(took) => {
            took_until_ready(template, Stage::Restore, took);
            "ready"
        }
        Err(reason) => {
            tracing::error!(%template, reason, "a VM could not be restored");
            "failed"
        }
    };
    counter!(REFILLS, "template" => template.to_string(), "result" => result).increment(1);
}

pub(crate) fn rewound(template: &TemplateName, took: Result<Duration, &str>) {
    let result = match took {
        Ok(took) => {
            histogram!(REWIND_SECONDS, "template" => template.to_string()).record(took.as_secs_f64());
            "ready"
        }
        Err(reason) => {
            tracing::error!(%template, reason, "a used VM was destroyed because it could not be rewound");
            "failed"
        }
    };
    counter!(REWINDS, "template" => template.to_string(), "result" => result).increment(1);
}

/// The budgets' series. They exist once, so their handles are kept.
pub(crate) struct Budgets {
    committed: Gauge,
    expected_dirty: Gauge,
    shared: Gauge,
    vcpus: Gauge,
}

impl std::fmt::Debug for Budgets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Budgets").finish_non_exhaustive()
    }
}

impl Budgets {
    /// Those of a node with these limits.
    pub(crate) fn of(limits: &Limits) -> Self {
        gauge!(MEMORY_LIMIT).set(figure(limits.memory));
        gauge!(VCPUS_LIMIT).set(figure(limits.vcpus));
        let [committed, expected_dirty] = [gauge!(MEMORY_COMMITTED), gauge!(MEMORY_EXPECTED_DIRTY)];
        Self { committed, expected_dirty, shared: gauge!(MEMORY_SHARED), vcpus: gauge!(VCPUS_COMMITTED) }
    }

    /// What is promised now.
    pub(crate) fn show(&self, committed: u64, expected_dirty: u64, shared: u64, vcpus: u64) {
        self.committed.set(figure(committed));
        self.expected_dirty.set(figure(expected_dirty));
        self.shared.set(figure(shared));
        self.vcpus.set(figure(vcpus));
    }
}

/// The series of one kind of turns.
pub(crate) struct Turns {
    taken: Gauge,
    queued: Gauge,
}

impl std::fmt::Debug for Turns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Turns").finish_non_exhaustive()
    }
}

impl Turns {
    /// Of those for this, so many at a time.
    pub(crate) fn of(what: &'static str, at_once: usize) -> Self {
        gauge!(TURNS_LIMIT, "for" => what).set(figure(at_once as u64));
        Self { taken: gauge!(TURNS_TAKEN, "for" => what), queued: gauge!(TURNS_QUEUED, "for" => what) }
    }

    pub(crate) fn show(&self, taken: usize, queued: usize) {
        self.taken.set(figure(taken as u64));
        self.queued.set(figure(queued as u64));
    }
}

pub(crate) fn refused(resource: Resource) {
    counter!(REFUSED, "resource" => resource.as_str()).increment(1);
}

/// What a VM's process has of memory as it stands ready. Blocks for as long as the kernel counts that.
pub(crate) fn stands_ready(template: &TemplateName, pid: u32) {
    match Footprint::of(pid) {
        Ok(Footprint { rss, pss }) => {
            histogram!(RSS, "template" => template.to_string()).record(figure(rss));
            histogram!(PSS, "template" => template.to_string()).record(figure(pss));
        }
        // It may have ended.
        Err(error) => tracing::debug!(%template, pid, %error, "the memory of a VM's process cannot be counted"),
    }
}

pub(crate) fn life_wrote(template: &TemplateName, bytes: u64) {
    histogram!(DIRTY, "template" => template.to_string()).record(figure(bytes));
}

#[allow(clippy::cast_precision_loss, reason = "no node has 2^53 bytes")]
const fn figure(count: u64) -> f64 {
    count as f64
}
