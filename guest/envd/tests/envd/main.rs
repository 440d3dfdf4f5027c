//! The daemon over real HTTP, on loopback sockets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "that is how tests fail, helpers too")]

mod files;
mod filesystem;
mod misuse;
mod output;
mod process;
mod rig;
mod system;
mod terminal;
mod watch;
