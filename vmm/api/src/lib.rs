//! Control messages between the node and one VMM process.
//!
//! The process is started with one `SOCK_SEQPACKET` socket and opens nothing by path: every file arrives over that socket
//! (`SCM_RIGHTS`), in the order that the request's documentation gives. One packet is one JSON message. Requests
//! are answered in order; [`Event`]s come between answers. When the socket closes, the process ends its VM and
//! itself: a VM never outlives its owner unnoticed, but for one that is kept ([`Request::Keep`]), which then waits for the next owner.
//! Without a runtime and without KVM.
//!
//! [`birth`] is the other half of the contract: the namespaces that a process is born with, and those that it is handed.

pub mod birth;
mod client;
mod message;
pub mod pager;
mod rate;

pub use client::{Client, Packets};
pub use message::{
    Disk, Event, FromVmm, GuestCrash, LiveReport, MachineSpec, Network, Phases, Reply, Request, RewindReport, Secret,
    SnapshotReport, Stop,
};
pub use rate::{RateLimit, TokenBucket};

/// Number of the inherited control socket in the VMM process: its standard input, since what is passed so can be passed without copying the
/// parent's page tables, as other numbers cannot. Standard output is what [`birth::Nothing::hand_over`] made.
pub const CONTROL_FD: i32 = 0;

/// Longest packet on the control socket, in bytes.
pub const MAX_PACKET: usize = 128 * 1024;

/// Most file descriptors in one packet.
pub const MAX_FDS: usize = 16;
