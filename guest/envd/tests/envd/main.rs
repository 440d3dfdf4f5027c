//! The daemon over real HTTP, on loopback sockets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "that is how tests fail, helpers too")]

mod misuse;
mod output;
mod process;
mod rig;
mod terminal;
