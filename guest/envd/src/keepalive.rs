//! Signs of life on streams that have nothing to say.

use std::time::Duration;

use http::HeaderMap;
use tokio::time::{Instant, sleep_until};

/// Where the client does not say, as E2B has it.
const DEFAULT: Duration = Duration::from_secs(90);

/// Due when nothing was said for long.
#[derive(Debug)]
pub(crate) struct Keepalive {
    interval: Duration,
    next: Instant,
}

impl Keepalive {
    /// As often as `Keepalive-Ping-Interval` asks, in seconds.
    pub(crate) fn asked(headers: &HeaderMap) -> Self {
        let interval = interval(headers);
        Self { interval, next: Instant::now() + interval }
    }

    /// Something was said.
    pub(crate) fn said(&mut self) {
        self.next = Instant::now() + self.interval;
    }

    /// Until one is due.
    pub(crate) async fn due(&self) {
        sleep_until(self.next).await;
    }
}

/// At most a day: more is as good as never, and cannot overflow.
fn interval(headers: &HeaderMap) -> Duration {
    let asked = headers.get("keepalive-ping-interval").and_then(|value| value.to_str().ok()?.trim().parse().ok());
    asked.filter(|seconds| *seconds > 0).map_or(DEFAULT, |seconds: u64| Duration::from_secs(seconds.min(24 * 60 * 60)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_is_what_was_asked_or_the_default() {
        for (header, seconds) in
            [("50", 50), (" 1 ", 1), ("0", 90), ("-3", 90), ("x", 90), ("18446744073709551615", 86400)]
        {
            let headers = HeaderMap::from_iter([("keepalive-ping-interval".parse().unwrap(), header.parse().unwrap())]);
            assert_eq!(interval(&headers).as_secs(), seconds, "{header}");
        }
        assert_eq!(interval(&HeaderMap::new()), DEFAULT);
    }
}
