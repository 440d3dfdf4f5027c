//! The gateway's metrics: every name once, with its help.

use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

/// Label of requests whose template does not exist, so that callers cannot make up series.
pub(crate) const UNKNOWN_TEMPLATE: &str = "unknown";

/// Upper bounds in seconds, of every histogram whose name ends with `_seconds`.
const SECONDS_BUCKETS: [f64; 24] = [
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.010, 0.015, 0.020, 0.030, 0.050, 0.075, 0.100, 0.150, 0.250, 0.500,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
];

/// A metric of the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Metric {
    /// Counter.
    Requests,
    /// Gauge.
    Inflight,
    /// Histogram.
    RequestDuration,
    /// Histogram.
    Overhead,
}

impl Metric {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Requests => "stasis_gateway_requests_total",
            Self::Inflight => "stasis_gateway_inflight",
            Self::RequestDuration => "stasis_gateway_request_duration_seconds",
            Self::Overhead => "stasis_gateway_overhead_seconds",
        }
    }

    pub(crate) fn add(self, labels: [(&'static str, String); 3]) {
        counter!(self.name(), &labels).increment(1);
    }

    pub(crate) fn up(self, template: &str) {
        gauge!(self.name(), "template" => template.to_owned()).increment(1);
    }

    pub(crate) fn down(self, template: &str) {
        gauge!(self.name(), "template" => template.to_owned()).decrement(1);
    }

    pub(crate) fn observe(self, template: &str, took: std::time::Duration) {
        histogram!(self.name(), "template" => template.to_owned()).record(took.as_secs_f64());
    }
}

/// Installs the process's one recorder, which renders every crate's metrics. Histograms named `…_seconds` get buckets from
/// 0.5 ms on. [`serve`](crate::serve) keeps it tidy and shows it as `/metrics`.
///
/// # Errors
/// Where the process has a recorder already.
pub fn install_recorder() -> Result<PrometheusHandle, BuildError> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &SECONDS_BUCKETS)?
        .install_recorder()?;
    describe();
    Ok(handle)
}

fn describe() {
    describe_counter!(
        Metric::Requests.name(),
        "Invocations by the status they ended with: 499 where the caller left first, 502 also for an answer that broke off \
         after its head was sent. start is hot, paused, cold, or none where there was no VM."
    );
    describe_gauge!(Metric::Inflight.name(), "Invocations whose answer is not complete.");
    describe_histogram!(
        Metric::RequestDuration.name(),
        Unit::Seconds,
        "From an invocation's head to the last byte of its answer."
    );
    describe_histogram!(
        Metric::Overhead.name(),
        Unit::Seconds,
        "From an invocation's head to the head of its answer, without the time that the function took."
    );
}
