//! The node: templates, their pools of paused microVMs, claims, admission.
//!
//! ```text
//! node        what a gateway talks to
//! ├ build       a folder becomes a template: boot once, wait until ready, snapshot, publish
//! ├ template    a published template, verified and held open
//! ├ pools       the templates in service, and the pools of each
//! ├ pool        one task per tenant and template: ready VMs, waiters, refill by event
//! │ └ restore     a VM restored and paused, then woken and proved
//! ├ session     sandboxes: VMs that stay, are paused and resumed
//! ├ vmm         the handle of one VMM process; its birth, uid and
//! │ └ cgroup      control group
//! ├ pager       the process that fills the memory of a compressed template's VMs
//! ├ agent       the conversations with the agent inside
//! └ admission   what the node can afford, reserved before anything starts
//! ```
//!
//! It owns every VM of a node and knows no HTTP route.

#![forbid(unsafe_code)]

mod admission;
mod agent;
mod build;
mod cgroup;
mod config;
mod lately;
mod metrics;
mod node;
mod pager;
mod pool;
mod pools;
mod restore;
mod session;
mod template;
mod vmm;

pub use cgroup::{CONTROLLERS, sweep_groups};
pub use config::{Base, Cores, Jail, KernelVariant, NodeConfig};
pub use node::{LocalNode, StartError};
pub use session::{Orphan, count_orphans, end_orphans, orphans};
pub use vmm::try_jail;
