//! The agent: PID 1 of every microVM.
//!
//! It starts the function, repairs identity after a restore and forwards connections to the function's port. It trusts
//! nothing that the function says and holds no secret.
//!
//! ```text
//! power-on: mount, lo up ─ listen on vsock ─ Hello ─ Start: spawn, ready ─ Park: sync, pin ─ Parked
//!                                                                                              │ snapshot
//! every restore:                                                Wake: repair, prove ─ forward ◄┘
//! ```
//!
//! The guest kernel may be interpreted by its host: there, a system call costs 0.2 ms, a page fault 1 ms
//! and a switch of threads more. So all that follows a restore is done by one thread, in few system calls, on memory
//! that was touched before.
//!
//! `unsafe` is confined to [`ioctls`], the mappings in [`text`] and [`page`] and one scheduler call in [`output`].

pub mod boot;
pub mod child;
pub mod console;
pub mod dial;
pub mod exec;
pub mod forward;
pub mod gate;
pub mod greeting;
pub mod hooks;
pub mod identity;
pub mod ioctls;
pub mod life;
pub mod mount;
pub mod output;
pub mod page;
pub mod poll;
pub mod ready;
pub mod repair;
pub mod serve;
pub mod socket;
pub mod start;
pub mod text;
