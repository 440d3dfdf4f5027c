//! The node's API.

use serde_json::Value;
use stasis_gateway::Config;
use stasis_pool_api::{BuildEvent, BuildFailure, BuildStep, Capacity};

use crate::support::{Claims, Gateway, capacity, template};

async fn gateway() -> Gateway {
    Gateway::start("hello", "", Config { max_archive: 1000, ..Config::default() }, Claims::Queued).await
}

fn post(body: &str, kind: &str) -> String {
    format!(
        "POST /v1/templates HTTP/1.1\r\nHost: h\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}

/// The lines inside a chunked body.
fn events(body: &str) -> Vec<Value> {
    body.lines().filter(|line| line.starts_with('{')).map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test]
async fn the_capacity_is_the_formula_with_its_numbers() {
    let gateway = Gateway::start("sums", "", Config::default(), Claims::Queued).await;
    let answer = gateway.ask("GET /v1/capacity").await;
    let shown: Capacity = serde_json::from_value(answer.json()).unwrap();
    assert_eq!((answer.status, shown), (200, capacity()));
}

#[tokio::test]
async fn health_metrics_and_lists_are_there() {
    let gateway = gateway().await;
    let health = gateway.ask("GET /healthz").await;
    assert_eq!((health.status, health.json()["status"].as_str()), (200, Some("ok")));
    assert_eq!(health.header("x-request-id").unwrap().len(), 36);

    gateway.ask("GET /invoke/no-such-one").await;
    let metrics = gateway.ask("GET /metrics").await;
    assert!(metrics.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    for wanted in [
        "# TYPE stasis_invoke_duration_seconds histogram",
        "# HELP stasis_invoke_inflight ",
        "stasis_invoke_duration_seconds_bucket{template=\"unknown\",le=\"0.001\"}",
        "stasis_invoke_requests_total{template=\"unknown\",code=\"404\",start=\"none\"}",
    ] {
        assert!(metrics.text().contains(wanted), "no {wanted} in\n{}", metrics.text());
    }
    assert_eq!(gateway.ask("GET /v1/pools").await.json()["pools"][0]["template"], "hello");
}

#[tokio::test]
async fn templates_are_listed_shown_and_removed() {
    let gateway = gateway().await;
    let list = gateway.ask("GET /v1/templates").await.json();
    assert_eq!(
        (list["templates"][0]["name"].as_str(), list["templates"][0]["digest"].as_str()),
        (Some("hello"), Some("d1"))
    );
    assert_eq!(gateway.ask("GET /v1/templates/hello").await.json()["port"], 8080);
    for path in ["GET /v1/templates/other", "DELETE /v1/templates/other", "GET /v1/templates/%20"] {
        let answer = gateway.ask(path).await;
        let (status, code, _) = answer.error();
        assert_eq!((status, code.as_str()), (404, "unknown_template"), "{path}");
        assert_eq!(answer.json()["error"]["list"], "/v1/templates");
    }
    assert_eq!(gateway.ask("DELETE /v1/templates/hello").await.status, 204);
    assert_eq!(gateway.ask("DELETE /v1/templates/hello").await.status, 404);
}

#[tokio::test]
async fn wrong_turns_say_where_to_go() {
    let gateway = gateway().await;
    for path in ["/", "/v2/templates", "/invoke"] {
        let (status, code, message) = gateway.ask(&format!("GET {path}")).await.error();
        assert_eq!((status, code.as_str()), (404, "not_found"));
        assert!(message.contains("/invoke/TEMPLATE"), "{message}");
    }
    let answer = gateway.ask("PUT /v1/templates").await;
    let (status, code, _) = answer.error();
    assert_eq!((status, code.as_str()), (405, "method_not_allowed"));
    let allowed = answer.header("allow").unwrap();
    assert!(allowed.contains("POST") && allowed.contains("GET"), "{allowed}");
}

#[tokio::test]
async fn a_build_tells_its_steps_and_its_end() {
    let gateway = gateway().await;
    *gateway.node.build.lock().unwrap() = Some(Ok(vec![
        BuildEvent::Step { step: BuildStep::Disk, elapsed_ms: 1 },
        BuildEvent::Step { step: BuildStep::Boot, elapsed_ms: 20 },
        BuildEvent::Built { template: Box::new(template("hello", "")), unchanged: false },
    ]));
    let answer = gateway.exchange(post("a tar, honestly", "application/x-tar")).await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/x-ndjson")));
    let events = events(answer.text());
    assert_eq!(events.len(), 3);
    assert_eq!((events[1]["step"].as_str(), events[1]["elapsed_ms"].as_u64()), (Some("boot"), Some(20)));
    let built: BuildEvent = serde_json::from_value(events[2].clone()).unwrap();
    assert!(matches!(built, BuildEvent::Built { template, .. } if template.spec.name.as_str() == "hello"));
    assert_eq!(gateway.node.archive.lock().unwrap().as_deref(), Ok(b"a tar, honestly".as_slice()));
}

#[tokio::test]
async fn a_build_that_stops_talking_has_failed() {
    let gateway = gateway().await;
    *gateway.node.build.lock().unwrap() = Some(Ok(vec![BuildEvent::Step { step: BuildStep::Disk, elapsed_ms: 1 }]));
    let answer = gateway.exchange(post("x", "application/x-tar")).await;
    let events = events(answer.text());
    assert_eq!(
        (events.len(), events[1]["event"].as_str(), events[1]["code"].as_str()),
        (2, Some("failed"), Some("platform"))
    );
}

#[tokio::test]
async fn refused_builds_have_a_status_and_the_numbers() {
    let gateway = gateway().await;
    let no_room = BuildFailure::NoCapacity {
        resource: "memory".into(),
        needed: 512,
        available: 100,
        retry_after: std::time::Duration::from_secs(11),
    };
    for (failure, wanted, code) in [
        (BuildFailure::Invalid { reason: "no template.toml".into() }, 400, "invalid"),
        (no_room, 507, "no_capacity"),
        (BuildFailure::Platform { reason: "disk gone".into(), console: String::new() }, 500, "platform"),
    ] {
        *gateway.node.build.lock().unwrap() = Some(Err(failure));
        let answer = gateway.exchange(post("x", "application/x-tar")).await;
        let (status, told, _) = answer.error();
        assert_eq!((status, told.as_str()), (wanted, code));
        if wanted == 507 {
            let error = &answer.json()["error"];
            assert_eq!(answer.header("retry-after"), Some("11"));
            assert_eq!((error["needed"].as_u64(), error["available"].as_u64()), (Some(512), Some(100)));
        }
    }
}

#[tokio::test]
async fn archives_are_checked_at_the_door() {
    let gateway = gateway().await;
    let (status, code, _) = gateway.exchange(post("x", "text/plain")).await.error();
    assert_eq!((status, code.as_str()), (415, "unsupported_media_type"));
    assert_eq!(gateway.exchange(post(&"x".repeat(1001), "application/x-tar")).await.error().0, 413);
    let chunked = format!(
        "POST /v1/templates HTTP/1.1\r\nHost: h\r\nContent-Type: application/x-tar\r\nTransfer-Encoding: chunked\r\n\
         Connection: close\r\n\r\n3e9\r\n{}\r\n0\r\n\r\n",
        "x".repeat(1001)
    );
    let (status, code, _) = gateway.exchange(chunked).await.error();
    assert_eq!((status, code.as_str()), (413, "body_too_large"));
    assert!(gateway.node.archive.lock().unwrap().is_err());
}

#[tokio::test]
async fn a_build_s_options_are_its_query() {
    let gateway = gateway().await;
    for (query, clock) in [("", None), ("?clock_ns=1700000000000000007", Some(1_700_000_000_000_000_007))] {
        *gateway.node.build.lock().unwrap() = Some(Ok(vec![]));
        let request = post("x", "application/x-tar").replace("/v1/templates", &format!("/v1/templates{query}"));
        assert_eq!(gateway.exchange(request).await.status, 200);
        assert_eq!(gateway.node.options.lock().unwrap().clock_ns, clock);
    }
    let request = post("x", "application/x-tar").replace("/v1/templates", "/v1/templates?clock_ns=yesterday");
    let (status, code, message) = gateway.exchange(request).await.error();
    assert_eq!((status, code.as_str()), (400, "invalid_query"));
    assert!(message.contains("clock_ns"), "{message}");
}
