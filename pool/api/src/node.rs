//! The interface of a node.

use std::{io, pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{Stream, future::BoxFuture};
use serde::{Deserialize, Serialize};
use stasis_state::Tenant;
use tokio::sync::mpsc;

use crate::{
    BuildEvent, BuildFailure, Capacity, Claim, ClaimError, PoolPatch, PoolStatus, Sandboxes, SetPoolError,
    TemplateInfo, TemplateName,
};

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
    /// Takes a VM for a tenant, wakes it, has it prove its repair and connects to its function, within `budget`.
    /// Dropping the future gives up the place in the queue and frees whatever it holds.
    fn claim<'a>(
        &'a self,
        tenant: &'a Tenant,
        template: &'a TemplateName,
        budget: Duration,
    ) -> BoxFuture<'a, Result<Claim, ClaimError>>;

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

    /// A tenant's sandboxes: others are unknown there.
    fn sandboxes(&self, tenant: &Tenant) -> Arc<dyn Sandboxes>;

    /// Its budgets, and what of them is promised.
    fn capacity(&self) -> Capacity;

    /// A tenant's pools, by template.
    fn pools<'a>(&'a self, tenant: &'a Tenant) -> BoxFuture<'a, Vec<PoolStatus>>;

    /// A tenant's pool of a template, be it that it has none yet; none if there is no such template.
    fn pool<'a>(&'a self, tenant: &'a Tenant, template: &'a TemplateName) -> BoxFuture<'a, Option<PoolStatus>>;

    /// Gives a tenant's pool of a template other settings, which survive restarts of the node, and begins it if it is not there.
    fn set_pool<'a>(
        &'a self,
        tenant: &'a Tenant,
        template: &'a TemplateName,
        patch: PoolPatch,
    ) -> BoxFuture<'a, Result<PoolStatus, SetPoolError>>;
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
