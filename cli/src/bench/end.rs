//! How invocations end, and how many ended how.

use std::fmt;

use http::{HeaderMap, StatusCode};
use stasis_loadtest::{Finished, ServerTiming};
use stasis_pool_api::StartKind;

use super::tell;
use crate::client::http as api;

/// As `Server-Timing` names them: together they are the time from the claim's beginning to the head of the function's answer.
pub(super) const PHASES: [&str; 5] = ["queue", "claim", "restore", "repair", "guest"];

/// How one invocation ended.
pub(super) enum End {
    Answered {
        start: StartKind,
        timing: ServerTiming,
    },
    /// 429: no VM came free.
    Exhausted,
    Failed(String),
}

impl End {
    /// Any status below 500 is the function's answer, if a VM gave it.
    pub(super) fn of(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Self {
        let text = |name| headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
        let start = text("x-stasis-start").next().and_then(|start| {
            [StartKind::Hot, StartKind::Paused, StartKind::Cold].into_iter().find(|kind| kind.as_str() == start)
        });
        match start {
            Some(start) if !status.is_server_error() => {
                let timing = ServerTiming::parse(text("server-timing"));
                match PHASES.into_iter().find(|phase| timing.get(phase).is_none()) {
                    Some(phase) => Self::Failed(format!("the answer's Server-Timing has no {phase}")),
                    None => Self::Answered { start, timing },
                }
            }
            None if status == StatusCode::TOO_MANY_REQUESTS => Self::Exhausted,
            _ => Self::Failed(api::reason(body).unwrap_or_else(|| format!("HTTP {status}"))),
        }
    }
}

/// How many invocations ended how.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Tally<'a> {
    paused: usize,
    cold: usize,
    exhausted: usize,
    failed: usize,
    pub(super) first_failure: Option<&'a str>,
}

impl<'a> Tally<'a> {
    pub(super) fn of(calls: &'a [Finished<End>]) -> Self {
        let mut tally = Self::default();
        for call in calls {
            match &call.value {
                // Both stood ready.
                End::Answered { start: StartKind::Hot | StartKind::Paused, .. } => tally.paused += 1,
                // Invocations are never of a sandbox.
                End::Answered { .. } => tally.cold += 1,
                End::Exhausted => tally.exhausted += 1,
                End::Failed(reason) => {
                    tally.failed += 1;
                    tally.first_failure.get_or_insert(reason);
                }
            }
        }
        tally
    }

    pub(super) fn tell(&self, load: &str) {
        if let Some(first) = self.first_failure {
            tell(format_args!("{load}: {} requests failed, the first so: {first}", self.failed));
        }
    }
}

impl fmt::Display for Tally<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { paused, cold, exhausted, failed, .. } = self;
        write!(f, "{paused} paused, {cold} cold; {failed} errors, {exhausted} refused with 429")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const TIMING: &str = "queue;dur=1, claim;dur=2, restore;dur=0, repair;dur=3, guest;dur=4";

    fn end(status: u16, headers: &[(&'static str, &str)], body: &str) -> End {
        let headers = headers.iter().map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap()));
        End::of(StatusCode::from_u16(status).unwrap(), &headers.collect(), body.as_bytes())
    }

    #[test]
    fn a_function_s_refusal_is_an_answer_and_the_gateway_s_is_none() {
        let vm = [("x-stasis-start", "cold"), ("server-timing", TIMING)];
        for status in [200, 404, 429] {
            assert!(matches!(end(status, &vm, ""), End::Answered { start: StartKind::Cold, .. }), "{status}");
        }
        assert!(matches!(end(429, &[], ""), End::Exhausted));
        let body = r#"{"error": {"message": "broke off"}, "request_id": "7"}"#;
        assert!(matches!(end(502, &vm, body), End::Failed(reason) if reason == "broke off (request 7)"));
        assert!(matches!(end(404, &[], ""), End::Failed(reason) if reason.contains("404")));
        let short = [("x-stasis-start", "paused"), ("server-timing", "queue;dur=1")];
        assert!(matches!(end(200, &short, ""), End::Failed(reason) if reason.contains("no claim")));
    }

    #[test]
    fn the_tally_keeps_the_first_reason() {
        let call = |value| Finished { at: Duration::ZERO, took: Duration::ZERO, value };
        let paused = || End::Answered { start: StartKind::Paused, timing: ServerTiming::default() };
        let calls = [paused(), End::Failed("a".into()), End::Exhausted, End::Failed("b".into()), paused()].map(call);
        let tally = Tally::of(&calls);
        assert_eq!(tally, Tally { paused: 2, cold: 0, exhausted: 1, failed: 2, first_failure: Some("a") });
        assert_eq!(tally.to_string(), "2 paused, 0 cold; 2 errors, 1 refused with 429");
    }
}
