//! Where the time went, and which VM it was, as headers.

use std::{fmt::Write as _, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::events::Invocation;

const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
const START: HeaderName = HeaderName::from_static("x-stasis-start");
const VM: HeaderName = HeaderName::from_static("x-stasis-vm");

/// Adds what is known of `call`. A function cannot speak for us: its own values go, but its timings stay before ours.
pub(super) fn stamp(headers: &mut HeaderMap, call: &Invocation) {
    headers.remove(START);
    headers.remove(VM);
    let Some(vm) = call.vm() else { return };
    headers.insert(START, HeaderValue::from_static(vm.start.as_str()));
    if let Ok(id) = HeaderValue::from_str(&vm.id.to_string()) {
        headers.insert(VM, id);
    }
    let timings = &vm.timings;
    let phases = [
        ("queue", Some(timings.queue)),
        ("claim", Some(timings.claim)),
        ("restore", Some(timings.restore)),
        ("repair", Some(timings.repair)),
        ("guest", call.guest()),
    ];
    if let Ok(value) = HeaderValue::from_str(&format(&phases)) {
        headers.append(SERVER_TIMING, value);
    }
}

fn format(phases: &[(&str, Option<Duration>)]) -> String {
    let mut text = String::with_capacity(96);
    for (name, took) in phases {
        let Some(took) = took else { continue };
        let comma = if text.is_empty() { "" } else { ", " };
        let _ = write!(text, "{comma}{name};dur={:.3}", took.as_secs_f64() * 1e3);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_with_three_decimals() {
        let phases =
            [("queue", Some(Duration::ZERO)), ("claim", Some(Duration::from_nanos(1_234_567))), ("guest", None)];
        assert_eq!(format(&phases), "queue;dur=0.000, claim;dur=1.235");
    }
}
