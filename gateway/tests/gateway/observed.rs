//! What an operator sees of known events: series and log lines.

use std::{
    io,
    sync::{Arc, Mutex},
};

use serde_json::Value;
use stasis_gateway::Config;
use stasis_pool_api::{ClaimError, TemplateName};
use tokio::io::AsyncWriteExt as _;

use crate::support::{Claims, Gateway, read_to};

#[tokio::test]
async fn known_events_are_counted_exactly_and_go_with_their_template() {
    let gateway = Gateway::raw("counted", |mut stream| async move {
        read_to(&mut stream, "\r\n\r\n").await;
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await.unwrap();
    })
    .await;
    assert_eq!(gateway.ask("GET /invoke/counted").await.status, 200);
    gateway.until_counted("counted", 200, "paused").await;
    let shown = gateway.ask("GET /metrics").await;
    for line in [
        "# TYPE stasis_invoke_requests_total counter",
        "# TYPE stasis_invoke_inflight gauge",
        "# TYPE stasis_invoke_queue_depth gauge",
        "# TYPE stasis_invoke_overhead_seconds histogram",
        "stasis_invoke_requests_total{template=\"counted\",code=\"200\",start=\"paused\"} 1",
        "stasis_invoke_inflight{template=\"counted\"} 0",
        "stasis_invoke_queue_depth{template=\"counted\"} 0",
        "stasis_invoke_duration_seconds_count{template=\"counted\"} 1",
        "stasis_invoke_duration_seconds_bucket{template=\"counted\",le=\"300\"} 1",
        "stasis_invoke_overhead_seconds_count{template=\"counted\"} 1",
        "stasis_invoke_ttfb_seconds_count{template=\"counted\"} 1",
        "stasis_invoke_queue_wait_seconds_count{template=\"counted\"} 1",
        "stasis_invoke_overhead_seconds_bucket{template=\"counted\",le=\"60\"} 1",
    ] {
        assert!(shown.text().lines().any(|one| one == line), "no {line} in:\n{}", shown.text());
    }
    let buckets = |name: &str| {
        let series = format!("{name}_bucket{{template=\"counted\"");
        shown.text().lines().filter(|line| line.starts_with(&series)).count()
    };
    // With the one that holds all.
    assert_eq!((buckets("stasis_invoke_overhead_seconds"), buckets("stasis_invoke_duration_seconds")), (23, 25));

    assert_eq!(gateway.ask("DELETE /v1/templates/counted").await.status, 204);
    let shown = gateway.ask("GET /metrics").await;
    assert!(!shown.text().contains("counted"), "{}", shown.text());
}

#[tokio::test]
async fn what_was_refused_is_counted_by_why() {
    let refused = |template: TemplateName| ClaimError::Broken { template, reason: "image altered".into() };
    let gateway = Gateway::start("shed", "", Config::default(), Claims::Refused(refused)).await;
    gateway.ask("GET /invoke/shed").await;
    gateway.until_counted("shed", 503, "none").await;
    let shown = gateway.ask("GET /metrics").await;
    let line = "stasis_invoke_shed_total{template=\"shed\",reason=\"template_broken\"} 1";
    assert!(shown.text().lines().any(|one| one == line), "no {line} in:\n{}", shown.text());
}

#[tokio::test]
async fn those_who_wait_are_counted_and_those_who_left_are_not() {
    let gateway = Gateway::start("queued", "", Config::default(), Claims::Queued).await;
    let depth = async |wanted: &str| {
        let shown = gateway.ask("GET /metrics").await;
        let line = format!("stasis_invoke_queue_depth{{template=\"queued\"}} {wanted}");
        assert!(shown.text().lines().any(|one| one == line), "no {line} in:\n{}", shown.text());
    };
    let mut waiting = gateway.connect().await;
    waiting.write_all(b"GET /invoke/queued HTTP/1.1\r\nHost: h\r\n\r\n").await.unwrap();
    gateway.until(|vms| vms.asked == 1).await;
    depth("1").await;
    drop(waiting);
    gateway.until_counted("queued", 499, "none").await;
    depth("0").await;
}

/// What is logged, for a test to read.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_log_line_names_the_request_and_the_sandbox() {
    let lines = Lines::default();
    let writer = lines.clone();
    let log = tracing_subscriber::fmt().json().with_writer(move || writer.clone()).finish();
    // All of the test runs on this thread.
    let _here = tracing::subscriber::set_default(log);
    let gateway = Gateway::start("hello", "", Config::default(), Claims::Queued).await;
    let logged = async |message: &str, request: &str| {
        let request = format!("{request} HTTP/1.1\r\nHost: h\r\nX-Request-Id: id-7\r\nConnection: close\r\n\r\n");
        assert_eq!(gateway.exchange(&request).await.status, 409);
        let written = String::from_utf8(std::mem::take(&mut *lines.0.lock().unwrap())).unwrap();
        let written: Vec<Value> = written.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let line = written.iter().map(|line| &line["fields"]).find(|fields| fields["message"] == message);
        line.unwrap_or_else(|| panic!("no {message} in {written:?}")).clone()
    };
    let call = logged("invocation", "GET /sandbox/asleep/path?secret").await;
    let command = logged("command", "DELETE /v1/sandboxes/asleep/hold/x?secret").await;
    for (line, path) in [(&call, "/sandbox/asleep/path"), (&command, "/v1/sandboxes/asleep/hold/x")] {
        for (field, wanted) in [("request_id", "id-7"), ("sandbox", "asleep"), ("path", path)] {
            assert_eq!(line[field], wanted, "{line}");
        }
        assert_eq!(line["status"], 409, "{line}");
    }
    assert_eq!((&call["template"], &command["tenant"]), (&"hello".into(), &"default".into()));
}
