//! Volumes, and what only a file system with reflink can show. They need root and loop devices, and say so where these are missing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "that is how tests fail")]

mod clone;
mod life;
mod refusals;
mod snapshot;
mod support;
