//! Sandboxes: VMs that stay, and are paused and resumed.
//!
//! ```text
//! service     the node's sandboxes: makes, finds and ends them; the records of a node that was killed
//! ├ api         what callers ask of them
//! ├ aside       a sandbox whose record cannot be read, and which nobody touches
//! └ driver      one task per sandbox: carries out what its `stasis_state::Session` decides
//!   ├ work        what is done to its VM, beside all else
//!   ├ departure   its end, when the node's has come
//!   ├ adoption    before that, of one that an earlier node has left: waits for its VM
//!   ├ visit       a request's connection, which keeps it awake
//!   ├ info        what is shown of it
//!   ├ exec        a command beside the function, which does so too
//!   └ machine     its VM: connect, stop, let run, save, make again
//!     ├ saved       what a hibernated one is brought back from, on disk
//!     └ kept        what a running or suspended one is found again by, should the node be killed or leave
//!       ├ survivors   those that an earlier node has left
//!       └ orphans     those that have no node now, as an operator sees them
//! measured    the store of records, with how long its operations take
//! ```
//!
//! What is decided when is in `stasis-state`, and only there. A sandbox's VM comes from its template's pool and never goes back.

mod adoption;
mod aside;
mod departure;
mod driver;
mod exec;
mod info;
mod kept;
mod machine;
mod measured;
mod message;
mod orphans;
mod saved;
mod service;
#[cfg(test)]
mod tests;
mod visit;
mod work;
mod write;

pub use self::orphans::{Orphan, count_orphans, end_orphans, orphans};
pub(crate) use self::{
    kept::{Survivors, VMS},
    machine::FromPools,
    measured::Measured,
    service::LocalSandboxes,
};

/// Says what each series of sandboxes means.
pub(crate) fn describe_metrics() {
    service::metrics::describe();
    measured::describe();
}
