//! Sandboxes in figures.

use std::time::Duration;

use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use stasis_state::{Event, State};

const TRANSITIONS: &str = "stasis_sandbox_transitions_total";
const SANDBOXES: &str = "stasis_sandboxes";
const PAUSE_SECONDS: &str = "stasis_sandbox_pause_seconds";
const HIBERNATE_SECONDS: &str = "stasis_sandbox_hibernate_seconds";
const RESUME_SECONDS: &str = "stasis_sandbox_resume_seconds";

pub(crate) fn describe() {
    describe_counter!(TRANSITIONS, "Transitions of sandboxes, by event, as their records took them.");
    describe_gauge!(SANDBOXES, "Sandboxes, by state.");
    describe_histogram!(
        PAUSE_SECONDS,
        Unit::Seconds,
        "From the record that a pause has begun to the record that it is suspended."
    );
    describe_histogram!(HIBERNATE_SECONDS, Unit::Seconds, "The same, from suspended to hibernated.");
    describe_histogram!(RESUME_SECONDS, Unit::Seconds, "The same, from suspended or hibernated (from) to running.");
}

pub(crate) fn transition(event: Event) {
    counter!(TRANSITIONS, "event" => event.name()).increment(1);
}

/// A pause, a hibernation or a resume has ended with this, so long after it began.
pub(crate) fn completed(event: Event, from_disk: bool, took: Duration) {
    let seconds = match event {
        Event::Paused => histogram!(PAUSE_SECONDS),
        Event::Hibernated => histogram!(HIBERNATE_SECONDS),
        Event::Resumed => histogram!(RESUME_SECONDS, "from" => if from_disk { "hibernated" } else { "suspended" }),
        _ => return,
    };
    seconds.record(took.as_secs_f64());
}

/// Counts a sandbox in its state, until dropped.
pub(crate) struct Counted(State);

impl Counted {
    pub(crate) fn new(state: State) -> Self {
        gauge!(SANDBOXES, "state" => state.name()).increment(1);
        Self(state)
    }

    pub(crate) fn moves_to(&mut self, state: State) {
        *self = Self::new(state);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        gauge!(SANDBOXES, "state" => self.0.name()).decrement(1);
    }
}
