//! What a template build tells while it runs.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::TemplateInfo;

/// One line of a build's progress. The last one is `Built` or `Failed`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum BuildEvent {
    /// A step has begun.
    Step {
        /// Which one.
        step: BuildStep,
        /// Since the build's start, milliseconds.
        elapsed_ms: u64,
    },
    /// The template is published, and its pool is being filled.
    Built {
        /// The template.
        template: Box<TemplateInfo>,
        /// The same inputs were already published: nothing was done.
        unchanged: bool,
    },
    /// Nothing was published.
    Failed(BuildFailure),
}

/// The steps of a build, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BuildStep {
    /// The folder becomes a file system image, the base's disk is cloned.
    Disk,
    /// The kernel boots.
    Boot,
    /// The function starts.
    Start,
    /// Memory and state are written.
    Snapshot,
    /// Everything is hashed and renamed into place.
    Publish,
}

impl BuildStep {
    /// For a person.
    #[must_use]
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Disk => "preparing disks",
            Self::Boot => "booting the kernel",
            Self::Start => "starting the function",
            Self::Snapshot => "taking the snapshot",
            Self::Publish => "hashing and publishing",
        }
    }
}

/// Why a build failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "code", rename_all = "snake_case")]
pub enum BuildFailure {
    /// The archive or its `template.toml` is not acceptable.
    #[error("{reason}")]
    Invalid {
        /// What to change.
        reason: String,
    },
    /// The node has no room. Nothing was started.
    #[error("not enough {resource}: {needed}{unit} needed, {available}{unit} available", unit = unit(.resource))]
    NoCapacity {
        /// `memory`, `vcpus` or `disk`.
        resource: String,
        /// Bytes, or vCPUs, needed.
        needed: u64,
        /// Bytes, or vCPUs, there.
        available: u64,
        /// When to try again, which is a header.
        #[serde(skip)]
        retry_after: Duration,
    },
    /// The function did not become ready.
    #[error("{reason}")]
    NotReady {
        /// Why.
        reason: String,
        /// The last 64 KiB of what the start command printed.
        output: String,
        /// The console's tail.
        console: String,
    },
    /// The guest stopped, or the platform failed.
    #[error("{reason}")]
    Platform {
        /// Why.
        reason: String,
        /// The console's tail, where there was a guest.
        console: String,
    },
}

fn unit(resource: &str) -> &'static str {
    if resource == "vcpus" { "" } else { " bytes" }
}
