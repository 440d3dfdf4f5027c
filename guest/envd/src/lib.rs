//! The envd protocol inside a guest: what the E2B SDKs call on port 49983.
//!
//! ```text
//!  listener ─▶ server ─▶ access ─┬▶ process      start, connect, input, signals, terminals
//!                                ├▶ filesystem   stat, list, make, move, remove, watch
//!                                ├▶ files        bytes up and down, signed URLs
//!                                └▶ system       health, metrics, envs, init
//! ```
//! All of it runs on one thread (`current_thread`); work that blocks, on files, goes to tokio's blocking threads. The wire is HTTP/1.1 with
//! Connect JSON (`connect`), no protobuf.
//!
//! It is as mighty as the process that it runs in: as root it serves any path and starts processes as any user, since a sandbox belongs to
//! its tenant. It must not run as PID 1 beside a reaper of all children: it waits for its own.
//!
//! `unsafe` is in `process/child.rs` (what a child does between fork and exec) and `fd.rs` (a descriptor is registered with tokio) only.

mod access;
mod answer;
mod config;
mod connect;
mod envd;
mod fd;
mod files;
mod filesystem;
mod folders;
mod keepalive;
mod metadata;
mod paths;
mod process;
mod server;
mod system;
mod users;

pub use config::{Clock, Config};
pub use envd::Envd;
pub use server::{Door, serve};
