//! Sandboxes: VMs that stay, and are paused and resumed.
//!
//! ```text
//! service     the node's sandboxes: makes, finds and ends them; the records of a node that was killed
//! └ driver      one task per sandbox: carries out what its `stasis_state::Session` decides
//!   ├ visit       a request's connection, which keeps it awake
//!   └ machine     its VM: connect, stop, let run, save, make again
//!     └ saved       what a hibernated one is brought back from, on disk
//! ```
//!
//! What is decided when is in `stasis-state`, and only there. A sandbox's VM comes from its template's pool and never goes back.

mod driver;
mod machine;
mod message;
mod saved;
mod service;
#[cfg(test)]
mod tests;
mod visit;
mod write;

pub(crate) use self::{
    machine::FromPools,
    service::{LocalSandboxes, metrics::describe as describe_metrics},
};
