//! The interface of a node.

use std::{io, pin::Pin, time::Duration};

use bytes::Bytes;
use futures_util::{Stream, future::BoxFuture};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::{BuildEvent, BuildFailure, Capacity, Claim, ClaimError, NoCapacity, Sandboxes, TemplateInfo, TemplateName};

/// A tar archive of a template's folder, as it arrives.
pub type Archive = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;

/// A build's progress. It ends with `Built` or `Failed`; dropping it does not stop the build.
pub type BuildEvents = mpsc::Receiver<BuildEvent>;

/// How to build, beside what the folder says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildOptions {
    /// The wall clock that the function is started with, and the template's date, instead of now: for reproducible builds, and to make a
    /// template that is old on purpose. Nanoseconds since the Unix epoch.
    pub clock_ns: Option<u64>,
}

/// One node, as a gateway sees it.
pub trait Node: Send + Sync + 'static {
    /// Takes a VM, wakes it, has it prove its repair and connects to its function, within `budget`.
    /// Dropping the future gives up the place in the queue and frees whatever it holds.
    fn claim<'a>(&'a self, template: &'a TemplateName, budget: Duration) -> BoxFuture<'a, Result<Claim, ClaimError>>;

    /// All templates, by name.
    fn templates(&self) -> Vec<TemplateInfo>;

    /// One template.
    fn template(&self, name: &TemplateName) -> Option<TemplateInfo>;

    /// Whether there is a template of this name, be it one that is refused because it is damaged.
    fn knows(&self, name: &TemplateName) -> bool {
        self.template(name).is_some()
    }

    /// Builds a template from a folder's archive. Refusals that need no VM come as an error, before anything starts.
    fn build(&self, archive: Archive, options: BuildOptions) -> BoxFuture<'_, Result<BuildEvents, BuildFailure>>;

    /// Removes a template and drains its pool. Claimed VMs finish.
    fn remove<'a>(&'a self, name: &'a TemplateName) -> BoxFuture<'a, Result<(), RemoveError>>;

    /// Its sandboxes.
    fn sandboxes(&self) -> &dyn Sandboxes;

    /// Its budgets, and what of them is promised.
    fn capacity(&self) -> Capacity;

    /// All pools, by template.
    fn pools(&self) -> BoxFuture<'_, Vec<PoolStatus>>;
}

/// Why a template was not removed.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// No such template.
    #[error("there is no template {0}")]
    Unknown(TemplateName),
    /// Its files could not be removed.
    #[error("the files of template {name} could not be removed: {reason}")]
    Files {
        /// The template.
        name: TemplateName,
        /// Why.
        reason: String,
    },
}

/// A pool at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStatus {
    /// Its template.
    pub template: TemplateName,
    /// VMs that it wants ready.
    pub target: u32,
    /// Restored and paused.
    pub ready: u32,
    /// Being restored.
    pub restoring: u32,
    /// Used, and being brought back to the snapshot.
    pub rewinding: u32,
    /// Claimed.
    pub claimed: u32,
    /// Claims that wait.
    pub waiting: u32,
    /// Process ids of the ready VMs, for measurements.
    pub ready_pids: Vec<u32>,
    /// The last restore or repair that failed.
    pub last_failure: Option<String>,
    /// What the node has not enough of for the VMs that it wants.
    pub short_of: Option<NoCapacity>,
}

impl PoolStatus {
    /// VMs that it has, whatever they do.
    #[must_use]
    pub fn vms(&self) -> u32 {
        self.ready + self.restoring + self.rewinding + self.claimed
    }

    /// A pool that has nothing and wants nothing.
    #[must_use]
    pub fn gone(template: TemplateName) -> Self {
        Self {
            template,
            target: 0,
            ready: 0,
            restoring: 0,
            rewinding: 0,
            claimed: 0,
            waiting: 0,
            ready_pids: Vec::new(),
            last_failure: None,
            short_of: None,
        }
    }
}
