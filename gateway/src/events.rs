//! One invocation, from its head to its end: the log line and the metrics, told together.
//!
//! ```text
//! begin ──▶ claimed ──▶ answered ──▶ ended(status)      told once, when dropped
//!   └──────────┴───────────┴───────▶ dropped before: the caller left, 499
//! ```

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use http::{Method, StatusCode};
use stasis_pool_api::{Claim, StartKind, TemplateName, Timings};
use uuid::Uuid;

use crate::{
    metrics::{AllSeries, Metric, Series, UNKNOWN_TEMPLATE},
    request_id::RequestId,
};

/// nginx's code for a caller that left before its answer was complete.
pub(crate) const CALLER_LEFT: u16 = 499;

/// What is known of an invocation so far. Dropping it tells it.
#[derive(Debug)]
pub(crate) struct Invocation {
    id: RequestId,
    method: Method,
    path: String,
    series: Arc<Series>,
    begun: Instant,
    vm: Option<Vm>,
    guest: Option<Duration>,
    head: Option<Duration>,
    ended: Option<StatusCode>,
    bytes: u64,
    sandbox: Option<String>,
    waits: bool,
}

/// The VM that served it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Vm {
    pub(crate) id: Uuid,
    pub(crate) start: StartKind,
    pub(crate) timings: Timings,
}

impl Invocation {
    /// Of a template that exists, or of none.
    pub(crate) fn begin(
        all: &AllSeries,
        id: RequestId,
        method: Method,
        path: &str,
        template: Option<&TemplateName>,
    ) -> Self {
        let series = all.of(template.map_or(UNKNOWN_TEMPLATE, TemplateName::as_str));
        series.inflight.increment(1);
        Self {
            id,
            method,
            path: path.to_owned(),
            series,
            begun: Instant::now(),
            vm: None,
            guest: None,
            head: None,
            ended: None,
            bytes: 0,
            sandbox: None,
            waits: false,
        }
    }

    /// It is a request to this sandbox.
    pub(crate) fn in_sandbox(mut self, id: &str) -> Self {
        // What callers make up has no place in a log beyond what is needed to recognise it.
        self.sandbox = Some(id.chars().take(80).collect());
        self
    }

    /// It waits for a VM, or no longer.
    pub(crate) fn waits(&mut self, waits: bool) {
        match (self.waits, waits) {
            (false, true) => self.series.queue_depth.increment(1),
            (true, false) => self.series.queue_depth.decrement(1),
            _ => {}
        }
        self.waits = waits;
    }

    /// It was refused, with this code.
    pub(crate) fn shed(&self, code: &'static str) {
        Metric::Shed.add([("template", self.series.template.clone()), ("reason", code.to_owned())]);
    }

    pub(crate) fn id(&self) -> &RequestId {
        &self.id
    }

    pub(crate) const fn vm(&self) -> Option<&Vm> {
        self.vm.as_ref()
    }

    pub(crate) const fn guest(&self) -> Option<Duration> {
        self.guest
    }

    pub(crate) fn claimed(&mut self, claim: &Claim) {
        self.vm = Some(Vm { id: claim.vm, start: claim.start, timings: claim.timings });
    }

    /// The function's head arrived after `guest`.
    pub(crate) fn answered(&mut self, guest: Duration) {
        self.guest = Some(guest);
        self.head = Some(self.begun.elapsed());
    }

    pub(crate) const fn sent(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// The first end counts.
    pub(crate) fn ended(&mut self, status: StatusCode) {
        self.ended.get_or_insert(status);
    }
}

impl Drop for Invocation {
    fn drop(&mut self) {
        self.waits(false);
        let took = self.begun.elapsed();
        let unfinished = if std::thread::panicking() { 500 } else { CALLER_LEFT };
        let status = self.ended.map_or(unfinished, |status| status.as_u16());
        let start = self.vm.map_or("none", |vm| vm.start.as_str());

        self.series.inflight.decrement(1);
        Metric::Requests.add([
            ("template", self.series.template.clone()),
            ("code", status.to_string()),
            ("start", start.to_owned()),
        ]);
        self.series.took(took);
        if let (Some(head), Some(guest)) = (self.head, self.guest) {
            self.series.answered(head, guest);
        }
        if let Some(vm) = &self.vm {
            self.series.waited(vm.timings.queue);
        }
        tracing::info!(
            request_id = %self.id,
            template = %self.series.template,
            method = %self.method,
            path = %self.path,
            sandbox = self.sandbox,
            vm = self.vm.map(|vm| tracing::field::display(vm.id)),
            start,
            status,
            bytes = self.bytes,
            took_ms = millis(took),
            guest_ms = self.guest.map(millis),
            queue_ms = self.vm.map(|vm| millis(vm.timings.queue)),
            claim_ms = self.vm.map(|vm| millis(vm.timings.claim)),
            restore_ms = self.vm.map(|vm| millis(vm.timings.restore)),
            repair_ms = self.vm.map(|vm| millis(vm.timings.repair)),
            "invocation"
        );
    }
}

fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}
