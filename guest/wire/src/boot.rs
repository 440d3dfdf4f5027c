//! The conversation at power-on, from which a template is made.
//!
//! ```text
//! agent → node   Hello
//! node  → agent  Start(Start)            the function's command, port, environment
//! agent → node   Ready | Failed          Ready once the function answers on its port
//! node  → agent  Park
//! agent → node   Parked | Failed         then closes the connection: the VM may be snapshotted
//! ```

use alloc::{collections::BTreeMap, string::String, vec::Vec};
use core::time::Duration;

use serde::{Deserialize, Serialize};

use crate::page::WakePage;

/// What the agent says at power-on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromAgent {
    /// The agent runs, file systems are mounted.
    Hello {
        /// Version of the agent.
        agent_version: String,
        /// Release of the guest kernel (`uname -r`).
        kernel_release: String,
        /// The kernel's own boot id; every VM restored from the snapshot shows it again until repair.
        boot_id: String,
    },
    /// The function answers on its port.
    Ready {
        /// From the function's start to its first answer.
        elapsed: Duration,
        /// Times of a few requests to the readiness path made inside the guest, each from connect to the answer's
        /// end: what the guest's kernel and the function cost without any of the host's work.
        null_requests: Vec<Duration>,
    },
    /// The function did not become ready, or cannot be parked; nothing can be made of this VM.
    Failed {
        /// Why, in one line for a person.
        reason: String,
        /// The last 64 KiB of what the command printed.
        output: String,
    },
    /// The function is ready, file systems are synced, this connection is about to close.
    Parked {
        /// Where the agent waits for its first order; without one it does on vsock alone.
        #[serde(default)]
        wake_page: Option<WakePage>,
    },
}

/// What the node says at power-on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromNode {
    /// Start the function.
    Start(Start),
    /// Prepare for the snapshot.
    Park,
}

/// How to start the function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// A shell command, run by `/bin/sh -c` as the unprivileged user `user` in `/app`.
    pub command: String,
    /// TCP port on which the function will listen on 127.0.0.1; also its `PORT` variable.
    pub port: u16,
    /// Path whose `GET` answers below 500 when the function is ready; without one, an open port suffices.
    pub ready_path: Option<String>,
    /// How long the function may take to become ready.
    pub ready_timeout: Duration,
    /// Environment of the function, beside `PATH`, `HOME`, `USER`, `PORT`.
    pub env: BTreeMap<String, String>,
    /// Wall clock to set before the function starts, nanoseconds since the Unix epoch.
    pub wall_clock_ns: u64,
}
