//! A claim: one VM, awake and proved, that belongs to one request.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use uuid::Uuid;

use crate::{NoCapacity, SandboxError, TemplateInfo, TemplateName};

/// Bytes to and from the function's port.
pub trait GuestStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> GuestStream for T {}

/// Ownership of the claimed VM. Dropping it ends the VM.
pub trait Lease: Send + Sync {
    /// Tells the node that the function broke the request off, so that it logs what the guest's console says beside the
    /// request's id (a caller may choose its own).
    fn report_failure(&self, request: &str, reason: &str);

    /// The answer is complete: what counts requests counts this one no more, though the VM may come back a moment later.
    fn served(&self) {}

    /// Why the node itself has ended the connection, where it has: that is then no fault of the function's.
    fn taken_back(&self) -> Option<SandboxError> {
        None
    }
}

/// A VM that has proved its repair and belongs to the caller.
pub struct Claim {
    /// The VM.
    pub vm: Uuid,
    /// Its template, as of this claim.
    pub template: TemplateInfo,
    /// How it was come by.
    pub start: StartKind,
    /// Where the time went.
    pub timings: Timings,
    /// A connection to the function.
    pub stream: Box<dyn GuestStream>,
    /// The VM's end, when dropped.
    pub lease: Box<dyn Lease>,
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim").field("vm", &self.vm).field("start", &self.start).finish_non_exhaustive()
    }
}

/// How a claimed VM was come by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartKind {
    /// It ran, had proved its repair, and waited for a request.
    Hot,
    /// It stood restored and paused in the pool.
    Paused,
    /// It was restored for this claim, which had to wait.
    Cold,
    /// Of a sandbox: it ran.
    Running,
    /// Of a sandbox: it was paused, and this request, or one beside it, had it resumed.
    Resumed,
}

impl StartKind {
    /// As headers and labels show it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hot => "hot",
            Self::Paused => "paused",
            Self::Cold => "cold",
            Self::Running => "running",
            Self::Resumed => "resumed",
        }
    }
}

/// Where the time of a claim went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timings {
    /// Waiting for a VM.
    pub queue: Duration,
    /// Taking it and entering the guest.
    pub claim: Duration,
    /// Restoring it, as far as the claim had to wait for that (zero for a paused one).
    pub restore: Duration,
    /// From entering the guest to its verified certificate.
    pub repair: Duration,
}

/// Why there is no VM for a claim.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// No such template.
    #[error("there is no template {0}")]
    UnknownTemplate(TemplateName),
    /// All VMs that the pool or the node may have are taken, and none came free in time.
    #[error("no VM of template {template} came free within {waited:?}: {bound}")]
    Exhausted {
        /// The template.
        template: TemplateName,
        /// How long the claim waited.
        waited: Duration,
        /// The limit that was in the way, with its numbers.
        bound: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// The node has no room for a VM of it.
    #[error("no VM of template {template}: {full}")]
    NoCapacity {
        /// The template.
        template: TemplateName,
        /// What is short.
        full: NoCapacity,
        /// When to try again.
        retry_after: Duration,
    },
    /// So many claims of this template are there already as it takes at once, or as was set of the tenant's pool.
    #[error(
        "template {template} takes {limit} requests at once, and so many are there: pool.concurrency is the limit, of its template.toml or as set of the pool"
    )]
    Concurrency {
        /// The template.
        template: TemplateName,
        /// Its limit.
        limit: u32,
        /// When one of them may be over.
        retry_after: Duration,
    },
    /// Restores or repairs of this template fail.
    #[error("VMs of template {template} do not start: {reason}")]
    Broken {
        /// The template.
        template: TemplateName,
        /// The last failure.
        reason: String,
    },
}
