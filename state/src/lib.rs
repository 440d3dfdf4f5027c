//! What is known of every sandbox: one record each, the transitions that it can make, the store that keeps it, and what a session
//! decides.
//!
//! Knows no VM, no HTTP and no runtime. [`transition`] is the table; a [`Change`] is the only way to alter a record, and a [`Store`]
//! takes it only if nobody else was faster. [`Session`] is pure: inputs in, actions out.

#![forbid(unsafe_code)]

pub mod bench;
mod change;
mod due;
pub mod idle;
mod kill;
mod memory;
mod metadata;
mod name;
mod record;
mod session;
mod sqlite;
mod store;
mod time;
pub mod transition;

pub use change::{Change, Stamp};
pub use due::{Due, Duty};
pub use idle::{Activity, HeldBy, Idle};
pub use kill::begin_kill;
pub use memory::{MemoryStore, Table};
pub use metadata::{Metadata, MetadataError};
pub use name::{Name, NameError, NodeId, SandboxId, Tenant};
pub use record::{
    Deadline, DecodeError, Facts, Hold, Holds, HoldsError, Lifetime, New, OnTimeout, Owner, Process, RECORD_VERSION,
    Record, Saved, Template,
};
pub use session::{Action, Input, Limits, Refusal, RequestId, Session, Status, Work};
pub use sqlite::{OpenError, SqliteStore};
pub use store::{Damaged, Named, Notice, Page, Query, Store, StoreError};
pub use time::Timestamp;
pub use transition::{Event, Illegal, State};
