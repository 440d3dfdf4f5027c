//! The node's wire types, and the interface by which a gateway reaches it.
//!
//! [`Node`] is all that a gateway knows of a node. Without a runtime of its own and without KVM.

mod build;
mod capacity;
mod claim;
mod exec;
mod lasting;
mod node;
mod pool;
mod pool_spec;
mod sandbox;
mod spec;
mod template;
mod units;

pub use build::{BuildEvent, BuildFailure, BuildStep};
pub use capacity::{Capacity, MemoryCapacity, NoCapacity, Resource, RetryRule, TemplateCost, Turns, VcpuCapacity};
pub use claim::{Claim, ClaimError, GuestStream, Lease, StartKind, Timings};
pub use exec::{Command, CommandEvent, CommandEvents, MOST_INPUT, SandboxLogs, Written};
pub use lasting::{lasting, lasting_or_off};
pub use node::{Archive, BuildEvents, BuildOptions, Node, RemoveError};
pub use pool::{BoundBy, PoolStatus, SetPoolError};
pub use pool_spec::{Day, NotATime, NotAWindow, PoolPatch, PoolSpec, TimeOfDay, Window};
pub use sandbox::{
    NewSandbox, Next, NextKind, PauseTo, SandboxError, SandboxInfo, Sandboxes, allowed as allowed_of_sandbox,
};
pub use spec::{DevicesSpec, MemoryForm, SnapshotSpec, SpecError, TemplateSpec};
pub use stasis_state::{
    HeldBy, Hold, Idle, Metadata, Name, OnTimeout, SandboxId, State as SandboxState, Tenant, Timestamp,
};
pub use template::{MadeWith, TemplateInfo, TemplateName};
