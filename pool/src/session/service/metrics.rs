//! Sandboxes in figures.

use metrics::{counter, describe_counter};
use stasis_state::Event;

const TRANSITIONS: &str = "stasis_sandbox_transitions_total";

pub(crate) fn describe() {
    describe_counter!(TRANSITIONS, "Transitions of sandboxes, by event, as their records took them.");
}

pub(crate) fn transition(event: Event) {
    counter!(TRANSITIONS, "event" => event.name()).increment(1);
}
