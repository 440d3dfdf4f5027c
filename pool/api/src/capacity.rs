//! What a node can afford: its budgets in figures, and the refusal when one of them is used up.

use std::fmt;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

use crate::TemplateName;

/// What a node has only so much of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Resource {
    /// Bytes of memory.
    Memory,
    /// Virtual processors of guests that may run.
    Vcpus,
    /// Starts of VMs, so many at a time, in the time that a claim may wait.
    Starts,
}

impl Resource {
    /// As labels and answers show it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Vcpus => "vcpus",
            Self::Starts => "starts",
        }
    }
}

/// The node has not that much left. Nothing was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub struct NoCapacity {
    /// Of what.
    pub resource: Resource,
    /// How much more was asked for: bytes, or vCPUs; of starts the place in the line for a turn, 1 for the first.
    pub needed: u64,
    /// How much is not promised to others; of starts how many of the line can be done in the time that the claim may wait, by the
    /// measured rate.
    pub available: u64,
    /// How much there is in all; of starts how many at a time.
    pub limit: u64,
}

impl fmt::Display for NoCapacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { resource, needed, available, limit } = *self;
        match resource {
            Resource::Memory => {
                let [needed, available, limit] =
                    [needed, available, limit].map(|bytes| ByteSize::b(bytes).display().iec());
                write!(
                    f,
                    "the node is full: {needed} of memory needed, {available} of {limit} available; end or hibernate sandboxes, lower \
                     pool.min, or raise --memory (/v1/capacity shows who has it)"
                )
            }
            Resource::Vcpus => write!(
                f,
                "the node is full: {needed} vCPUs needed, {available} of {limit} available; wait for others to end, or raise \
                 --vcpu-overcommit (/v1/capacity shows the sum)"
            ),
            Resource::Starts => write!(
                f,
                "the node is full: the VM's start would be number {needed} in the line, {available} can be done in the time that this may wait, \
                 {limit} at a time; ask again later, keep more VMs ready (pool.min), or raise --claim-budget (/v1/capacity shows the line)"
            ),
        }
    }
}

/// A node's budgets at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Capacity {
    /// Memory.
    pub memory: MemoryCapacity,
    /// Virtual processors.
    pub vcpus: VcpuCapacity,
    /// VMs that may be restored at a time. More wait their turn.
    pub starts: Turns,
    /// Guests that may repair themselves at a time. More wait their turn.
    pub repairs: Turns,
    /// When refusals for want of memory or vCPUs say to try again.
    pub retry_after: RetryRule,
    /// What a VM of each template counts with.
    pub templates: Vec<TemplateCost>,
}

/// When to try again: `(needed - free + waited_for) / returned_per_s`, of the resource that is short, between two bounds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetryRule {
    /// It in words.
    pub formula: String,
    /// What came back so many seconds ago counts a third of what comes back now.
    pub lately_s: u64,
    /// Nobody is told to come back sooner.
    pub min_s: u64,
    /// Nor later.
    pub max_s: u64,
}

/// Memory in bytes: `free = limit - committed - expected_dirty - shared`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemoryCapacity {
    /// That the node may promise.
    pub limit: u64,
    /// Of VMs that run or have run, builds and pagers: each counts with all of its guest's memory, and what its process needs.
    pub committed: u64,
    /// Of VMs that have not run since their restore or rewind: each counts with what a life is expected to write
    /// ([`TemplateCost::paused`]). Before one may run it is promised all of its memory.
    pub expected_dirty: u64,
    /// Images that VMs share in the page cache: each once, while there is a VM of it.
    pub shared: u64,
    /// Not promised.
    pub free: u64,
    /// The sum in words.
    pub formula: String,
    /// Of what is promised: on its way back, or given up as soon as somebody needs it. VMs that end, are rewound or hibernated, suspended
    /// sandboxes, and VMs that stand ready beyond what their pool keeps.
    pub returning: u64,
    /// Those wait for so much who were refused, and for whom what is returning suffices.
    pub waited_for: u64,
    /// Given back per second lately.
    pub returned_per_s: f64,
}

/// Virtual processors: `limit = cores * overcommit`, `free = limit - committed`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VcpuCapacity {
    /// Processors of the host that this node may use.
    pub cores: u32,
    /// vCPUs that may be promised on each.
    pub overcommit: u32,
    /// Their product.
    pub limit: u64,
    /// Of VMs that run or have run. One that stands ready in a pool has none.
    pub committed: u64,
    /// Not promised.
    pub free: u64,
    /// As of memory.
    pub returning: u64,
    /// As of memory.
    pub waited_for: u64,
    /// As of memory.
    pub returned_per_s: f64,
}

/// Things that are done only so many at a time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Turns {
    /// At a time.
    pub limit: u64,
    /// Now.
    pub under_way: u64,
    /// That wait for their turn.
    pub queued: u64,
    /// That can begin per second while others wait: `limit` by the mean length of the last ten or so. None until one has ended.
    pub per_s: Option<f64>,
}

/// What a VM of a template counts with, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateCost {
    /// The template.
    pub template: TemplateName,
    /// While it may run.
    pub running: u64,
    /// While it stands ready.
    pub paused: u64,
    /// Its image, once for all of them; 0 where a pager, which is counted by itself, holds it.
    pub image: u64,
    /// Lives whose written memory was measured, of the last ones.
    pub lives: u64,
    /// What 99 of 100 of them have written at most; none before enough were measured.
    pub dirty_p99: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_how_much_and_what_to_do() {
        let full = NoCapacity { resource: Resource::Memory, needed: 264 << 20, available: 72 << 20, limit: 600 << 20 };
        let text = full.to_string();
        assert!(text.contains("264.0 MiB of memory needed, 72.0 MiB of 600.0 MiB available"), "{text}");
        assert!(text.contains("--memory"), "{text}");
        let full = NoCapacity { resource: Resource::Vcpus, needed: 2, available: 1, limit: 64 };
        assert!(full.to_string().contains("2 vCPUs needed, 1 of 64 available"), "{full}");
        let full = NoCapacity { resource: Resource::Starts, needed: 13, available: 12, limit: 4 };
        assert!(full.to_string().contains("number 13 in the line, 12 can be done"), "{full}");
    }
}
