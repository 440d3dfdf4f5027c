//! The gateway's metrics: every name once, with its help.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use metrics::{
    Gauge, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

/// Label of requests whose template does not exist, so that callers cannot make up series.
pub(crate) const UNKNOWN_TEMPLATE: &str = "unknown";

/// Upper bounds in seconds, of every histogram whose name ends with `_seconds`: fine where restores and claims are.
const SECONDS: [f64; 22] = [
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.010, 0.015, 0.020, 0.030, 0.050, 0.075, 0.100, 0.150, 0.250, 0.500,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
];
/// Of whole invocations, and of their heads: up to the longest that functions may take.
const INVOCATION_SECONDS: [f64; 24] = [
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.010, 0.015, 0.020, 0.030, 0.050, 0.075, 0.100, 0.150, 0.250, 0.500,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
];
/// Upper bounds in bytes, of every histogram whose name ends with `_bytes`: 64 KiB to 4 GiB.
const BYTES: [f64; 9] = [
    65_536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
    268_435_456.0,
    1_073_741_824.0,
    4_294_967_296.0,
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
    TimeToHead,
    /// Histogram.
    QueueWait,
    /// Histogram.
    Overhead,
    /// Gauge.
    QueueDepth,
    /// Counter.
    Shed,
}

impl Metric {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Requests => "stasis_invoke_requests_total",
            Self::Inflight => "stasis_invoke_inflight",
            Self::RequestDuration => "stasis_invoke_duration_seconds",
            Self::TimeToHead => "stasis_invoke_ttfb_seconds",
            Self::QueueWait => "stasis_invoke_queue_wait_seconds",
            Self::Overhead => "stasis_invoke_overhead_seconds",
            Self::QueueDepth => "stasis_invoke_queue_depth",
            Self::Shed => "stasis_invoke_shed_total",
        }
    }

    pub(crate) fn add<const LABELS: usize>(self, labels: [(&'static str, String); LABELS]) {
        counter!(self.name(), &labels).increment(1);
    }

    fn gauge(self, template: &str) -> Gauge {
        gauge!(self.name(), "template" => template.to_owned())
    }

    fn histogram(self, template: &str) -> Histogram {
        histogram!(self.name(), "template" => template.to_owned())
    }
}

/// One template's series, each looked up once: an invocation touches some of them while its caller waits.
#[derive(Debug)]
pub(crate) struct Series {
    pub(crate) template: String,
    pub(crate) inflight: Gauge,
    pub(crate) queue_depth: Gauge,
    duration: Histogram,
    time_to_head: Histogram,
    queue_wait: Histogram,
    overhead: Histogram,
}

impl Series {
    fn of(template: &str) -> Self {
        Self {
            template: template.to_owned(),
            inflight: Metric::Inflight.gauge(template),
            queue_depth: Metric::QueueDepth.gauge(template),
            duration: Metric::RequestDuration.histogram(template),
            time_to_head: Metric::TimeToHead.histogram(template),
            queue_wait: Metric::QueueWait.histogram(template),
            overhead: Metric::Overhead.histogram(template),
        }
    }

    /// The whole invocation.
    pub(crate) fn took(&self, time: Duration) {
        self.duration.record(time.as_secs_f64());
    }

    /// To the head of its answer, of which the function took `guest`.
    pub(crate) fn answered(&self, head: Duration, guest: Duration) {
        self.time_to_head.record(head.as_secs_f64());
        self.overhead.record(head.saturating_sub(guest).as_secs_f64());
    }

    /// Until it had a VM.
    pub(crate) fn waited(&self, time: Duration) {
        self.queue_wait.record(time.as_secs_f64());
    }
}

/// The series of the templates that were invoked. Their number is bounded: what does not exist has [`UNKNOWN_TEMPLATE`]'s.
#[derive(Debug, Default)]
pub(crate) struct AllSeries(RwLock<HashMap<String, Arc<Series>>>);

impl AllSeries {
    pub(crate) fn of(&self, template: &str) -> Arc<Series> {
        if let Some(known) = self.0.read().unwrap_or_else(PoisonError::into_inner).get(template) {
            return Arc::clone(known);
        }
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(template.to_owned()).or_insert_with(|| Arc::new(Series::of(template))))
    }

    /// The template is gone. What still runs keeps its own.
    pub(crate) fn forget(&self, template: &str) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(template);
    }
}

/// Installs the process's one recorder, which renders every crate's metrics. Histograms named `…_seconds` get buckets from
/// 0.5 ms on, those named `…_bytes` from 64 KiB on. [`serve`](crate::serve) keeps it tidy and shows it as `/metrics`.
///
/// # Errors
/// Where the process has a recorder already.
pub fn install_recorder() -> Result<PrometheusHandle, BuildError> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Full(Metric::RequestDuration.name().into()), &INVOCATION_SECONDS)?
        .set_buckets_for_metric(Matcher::Full(Metric::TimeToHead.name().into()), &INVOCATION_SECONDS)?
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &SECONDS)?
        .set_buckets_for_metric(Matcher::Suffix("_bytes".into()), &BYTES)?
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
        Metric::TimeToHead.name(),
        Unit::Seconds,
        "From an invocation's head to the head of its answer."
    );
    describe_histogram!(Metric::QueueWait.name(), Unit::Seconds, "How long invocations that got a VM waited for it.");
    describe_histogram!(
        Metric::Overhead.name(),
        Unit::Seconds,
        "From an invocation's head to the head of its answer, without the time that the function took."
    );
    describe_gauge!(Metric::QueueDepth.name(), "Invocations that wait for a VM.");
    describe_counter!(
        Metric::Shed.name(),
        "Invocations refused with 429 or 503, by the code that their callers were told."
    );
}

/// What is rendered, without the series of templates that are gone: the recorder keeps a series for ever.
pub(crate) fn without_gone(rendered: &str, is_there: impl Fn(&str) -> bool) -> String {
    let template = |line: &str| {
        let (_, rest) = line.split_once("template=\"")?;
        Some(rest.split_once('"')?.0.to_owned())
    };
    let stays = |line: &&str| {
        line.starts_with('#') || template(line).is_none_or(|name| name == UNKNOWN_TEMPLATE || is_there(&name))
    };
    rendered.split_inclusive('\n').filter(stays).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const ALL: [Metric; 8] = [
        Metric::Requests,
        Metric::Inflight,
        Metric::RequestDuration,
        Metric::TimeToHead,
        Metric::QueueWait,
        Metric::Overhead,
        Metric::QueueDepth,
        Metric::Shed,
    ];

    #[test]
    fn operations_md_lists_the_gateways_series() {
        let page = include_str!("../../docs/operations.md");
        let (_, section) = page.split_once("\n## Metrics\n").unwrap();
        let rows =
            section.lines().take_while(|line| !line.starts_with("## ")).filter_map(|line| line.split('|').nth(1));
        let listed: BTreeSet<_> =
            rows.flat_map(|names| names.split('`')).filter(|name| name.starts_with("stasis_invoke_")).collect();
        assert_eq!(listed, ALL.into_iter().map(Metric::name).collect());
    }

    #[test]
    fn a_template_that_is_gone_leaves_no_handles() {
        let all = AllSeries::default();
        let (first, other) = (all.of("a"), all.of("b"));
        assert!(Arc::ptr_eq(&first, &all.of("a")));
        all.forget("a");
        assert_eq!(Arc::strong_count(&first), 1, "only whoever has it keeps it");
        assert!(Arc::ptr_eq(&other, &all.of("b")));
    }

    #[test]
    fn series_of_templates_that_are_gone_are_left_out() {
        let rendered = "# HELP a of template=\"gone\"\na{template=\"gone\",code=\"200\"} 1\na{template=\"here\"} 2\n\
                        a{template=\"unknown\"} 3\nb{le=\"1\",template=\"gone\"} 4\nc 5\n";
        let kept = "# HELP a of template=\"gone\"\na{template=\"here\"} 2\na{template=\"unknown\"} 3\nc 5\n";
        assert_eq!(without_gone(rendered, |name| name == "here"), kept);
    }
}
