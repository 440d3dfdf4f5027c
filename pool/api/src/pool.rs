//! A pool, as it is shown and set.

use serde::{Deserialize, Serialize};
use stasis_state::{Tenant, Timestamp};

use crate::{NoCapacity, PoolSpec, TemplateInfo, TemplateName};

/// A pool at one moment: one tenant's VMs of one template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PoolStatus {
    /// Its template.
    pub template: TemplateName,
    /// Whose it is.
    pub tenant: Tenant,
    /// Its settings: those of the template, and what was set since.
    pub settings: PoolSpec,
    /// VMs that it wants ready now, paused and hot.
    pub target: u32,
    /// What keeps it from having, or wanting, as many as its settings ask for.
    pub bound_by: Option<BoundBy>,
    /// When that changes next if nothing but time passes: a window of the schedule opens or closes, or it scales to zero.
    #[serde(default)]
    pub next_change_at: Option<Timestamp>,
    /// Restored and paused.
    pub ready: u32,
    /// Running, proved, and waiting for a request.
    pub hot: u32,
    /// Being restored.
    pub restoring: u32,
    /// Used, and being brought back to the snapshot.
    pub rewinding: u32,
    /// Being made hot.
    pub warming: u32,
    /// Claimed.
    pub claimed: u32,
    /// Claims that wait.
    pub waiting: u32,
    /// VMs that became ready per second lately, while some were wanted.
    pub refill_per_s: Option<f64>,
    /// VMs that are on their way on the mean, to replace what claims take: the rate of claims lately times the time until a VM is ready
    /// again. None until one was.
    #[serde(default)]
    pub offered_load: Option<f64>,
    /// Process ids of the paused VMs, for measurements.
    pub ready_pids: Vec<u32>,
    /// The last restore or repair that failed.
    pub last_failure: Option<String>,
    /// What the node has not enough of for the VMs that it wants.
    pub no_capacity: Option<NoCapacity>,
}

/// What is in a pool's way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BoundBy {
    /// `pool.max`.
    Max,
    /// `pool.max_memory`.
    MaxMemory,
    /// The node has no memory to promise now.
    NodeMemory,
    /// Nobody has used it for `pool.scale_to_zero_after`.
    Idle,
    /// VMs failed: it waits a while before it tries again unasked.
    Failures,
}

impl PoolStatus {
    /// VMs that it has, whatever they do.
    #[must_use]
    pub const fn vms(&self) -> u32 {
        self.ready + self.hot + self.restoring + self.rewinding + self.warming + self.claimed
    }

    /// A pool that has nothing and wants nothing.
    #[must_use]
    pub fn without_vms(tenant: Tenant, template: &TemplateInfo, settings: PoolSpec) -> Self {
        Self {
            template: template.spec.name.clone(),
            tenant,
            settings,
            target: 0,
            bound_by: None,
            next_change_at: None,
            ready: 0,
            hot: 0,
            restoring: 0,
            rewinding: 0,
            warming: 0,
            claimed: 0,
            waiting: 0,
            refill_per_s: None,
            offered_load: None,
            ready_pids: Vec::new(),
            last_failure: None,
            no_capacity: None,
        }
    }
}

/// Why a pool was not set.
#[derive(Debug, thiserror::Error)]
pub enum SetPoolError {
    /// No such template.
    #[error("there is no template {0}")]
    UnknownTemplate(TemplateName),
    /// The settings would be impossible.
    #[error("{0}")]
    Invalid(String),
    /// What was set could not be written down, and so does not hold.
    #[error("the pool's settings cannot be stored: {0}; look at the data directory's disk, and set them again")]
    Store(String),
}
