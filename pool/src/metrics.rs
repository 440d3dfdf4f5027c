//! The node's metrics. An event emits its log line and its series together.

mod pools;

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use stasis_pool_api::TemplateName;

pub(crate) use self::pools::{claim_failed, claimed, pool};

const REFILLS: &str = "stasis_pool_refill_total";
const REWINDS: &str = "stasis_pool_rewinds_total";
const REWIND_SECONDS: &str = "stasis_pool_rewind_seconds";
const TIME_TO_READY: &str = "stasis_pool_time_to_ready_seconds";
const MEMORY_LIMIT: &str = "stasis_node_memory_limit_bytes";
const MEMORY_COMMITTED: &str = "stasis_node_memory_committed_bytes";

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
    describe_histogram!(TIME_TO_READY, "From the start of a VMM process to a restored, paused VM.");
    describe_gauge!(MEMORY_LIMIT, "Memory that the node may promise to VMs.");
    describe_gauge!(MEMORY_COMMITTED, "Memory promised to VMs.");
}

pub(crate) fn restored(template: &TemplateName, took: Result<std::time::Duration, &str>) {
    let result = match took {
        Ok(took) => {
            histogram!(TIME_TO_READY, "template" => template.to_string()).record(took.as_secs_f64());
            "ready"
        }
        Err(reason) => {
            tracing::error!(%template, reason, "a VM could not be restored");
            "failed"
        }
    };
    counter!(REFILLS, "template" => template.to_string(), "result" => result).increment(1);
}

pub(crate) fn rewound(template: &TemplateName, took: Result<std::time::Duration, &str>) {
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

pub(crate) fn memory(total_mib: u32, available_mib: u32) {
    let bytes = |mib: u32| f64::from(mib) * f64::from(1 << 20);
    gauge!(MEMORY_LIMIT).set(bytes(total_mib));
    gauge!(MEMORY_COMMITTED).set(bytes(total_mib.saturating_sub(available_mib)));
}
