//! How language runtimes take part in the repair.
//!
//! A runtime whose random generator lives in its own memory (Python's `random`, V8's `Math.random`) would give
//! the same numbers in every VM of a template. Its hook (shipped in `guest/rootfs/overlay`) connects to
//! [`crate::HOOK_SOCKET`] when the runtime starts and sends one line, its name. After a restore the agent sends
//! `reseed <generation> <64 bytes of hex>\n`, each runtime its own bytes; the hook reseeds and answers
//! `ok <generation>\n`. The agent opens the gate only when every live connection has answered.

use alloc::{format, string::String};

/// The line that the agent sends.
#[must_use]
pub fn reseed(generation: u64, seed_hex: &str) -> String {
    format!("reseed {generation} {seed_hex}\n")
}

/// The line that it expects.
#[must_use]
pub fn acknowledgement(generation: u64) -> String {
    format!("ok {generation}\n")
}
