//! What the node and the agent inside a microVM say to each other over vsock.
//!
//! Every message is one frame: four bytes of length (little endian), then JSON ([`frame`]).
//! Two conversations exist. At power-on the agent calls the host ([`boot`]); after a restore the
//! host calls the agent ([`wake`]), and no byte of a request passes before the agent has answered
//! with a [`wake::Certificate`]; then also for commands beside the function ([`exec`]). Where it can, the
//! first wake of a life goes through a page of memory instead ([`page`]). This crate knows no socket and no runtime.

#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

pub mod boot;
pub mod exec;
pub mod frame;
pub mod hook;
pub mod page;
pub mod wake;

/// vsock port on which the agent listens inside the guest, from before the snapshot on.
pub const AGENT_PORT: u32 = 1024;

/// vsock port on the host (CID 2) that the agent connects to at power-on.
pub const BOOT_PORT: u32 = 1024;

/// Path of the Unix socket, inside the guest, at which language runtimes register ([`hook`]).
pub const HOOK_SOCKET: &str = "/run/stasis/hooks.sock";
