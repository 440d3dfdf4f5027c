//! The races that sink such platforms, model-checked: shuttle tries thousands of schedules of the same threads, and calls a thread that
//! waits for ever a deadlock.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "that is how tests fail")]

mod claim_retire;
mod model;
mod pause_request;

/// Schedules of each kind per model.
const SCHEDULES: usize = 3_000;

/// Tries schedules at random, and those in which few switches happen at the worst place.
fn check(model: impl Fn() + Send + Sync + 'static) {
    let model = std::sync::Arc::new(model);
    let again = std::sync::Arc::clone(&model);
    shuttle::check_random(move || model(), SCHEDULES);
    shuttle::check_pct(move || again(), SCHEDULES, 3);
}
