//! Tenants and their keys, and pools.

use stasis_gateway::{Config, Tenants};
use stasis_pool_api::ClaimError;

use crate::support::{Answer, Claims, Gateway, UNSTORABLE, raw_guest};

const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

async fn gateway(claims: Claims) -> Gateway {
    let file = format!("[[tenant]]\nname='a'\nkey='{A}'\n[[tenant]]\nname='b'\nkey='{B}'");
    let config = Config { tenants: Tenants::parse(&file).unwrap(), ..Config::default() };
    Gateway::start("hello", "", config, claims).await
}

async fn ask(gateway: &Gateway, what: &str, key: &str, body: &str) -> Answer {
    let length = body.len();
    let head =
        format!("{what} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nX-API-Key: {key}\r\nContent-Length: {length}");
    gateway.exchange(format!("{head}\r\n\r\n{body}")).await
}

#[tokio::test]
async fn without_a_tenants_key_there_is_nothing_but_health_and_metrics() {
    let gateway = gateway(Claims::Queued).await;
    for what in [
        "GET /v1/templates",
        "POST /v1/templates",
        "GET /v1/pools",
        "PATCH /v1/pools/hello",
        "GET /v1/sandboxes",
        "POST /v1/sandboxes",
        "GET /invoke/hello/",
        "GET /sandbox/asleep/",
        "GET /nothing",
    ] {
        for answer in [gateway.ask(what).await, ask(&gateway, what, "wrong", "").await] {
            let (status, code, message) = answer.error();
            assert_eq!((status, code.as_str()), (401, "unauthorized"), "{what}");
            assert!(message.contains("X-API-Key") && answer.header("www-authenticate").is_some(), "{what}: {message}");
        }
    }
    assert_eq!(gateway.ask("GET /healthz").await.status, 200);
    assert_eq!(gateway.ask("GET /metrics").await.status, 200);
    assert_eq!(*gateway.node.tenants.lock().unwrap(), Vec::<String>::new(), "the node heard of it");
}

#[tokio::test]
async fn a_key_says_whose_request_it_is_and_is_not_passed_on() {
    let guest = raw_guest(|mut stream| async move {
        let request = crate::support::read_to(&mut stream, "\r\n\r\n").await;
        let said = if request.contains(A) { "leaked" } else { "kept" };
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{said}", said.len());
        let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, answer.as_bytes()).await;
    });
    let gateway = gateway(guest).await;
    let answer = ask(&gateway, "GET /invoke/hello/", A, "").await;
    assert_eq!((answer.status, answer.text()), (200, "kept"));
    ask(&gateway, "GET /v1/sandboxes", B, "").await;
    let pools = ask(&gateway, "GET /v1/pools", B, "").await.json();
    assert_eq!(pools["pools"][0]["tenant"], "b");
    let tenants = gateway.node.tenants.lock().unwrap().clone();
    assert_eq!((tenants.first().unwrap().as_str(), tenants.last().unwrap().as_str()), ("a", "b"));
}

#[tokio::test]
async fn a_pool_is_shown_and_set() {
    let gateway = gateway(Claims::Queued).await;
    let shown = ask(&gateway, "GET /v1/pools/hello", A, "").await.json();
    assert_eq!((&shown["settings"]["min"], &shown["bound_by"]), (&4.into(), &serde_json::Value::Null));
    let set = ask(&gateway, "PATCH /v1/pools/hello", A, r#"{"min": 2, "scale_to_zero_after": "5m"}"#).await;
    assert_eq!(set.status, 200);
    assert_eq!((&set.json()["settings"]["min"], &set.json()["settings"]["max"]), (&2.into(), &32.into()));
    for (what, body, status, code) in [
        ("PATCH /v1/pools/hello", r#"{"min": 99}"#, 400, "invalid"),
        ("PATCH /v1/pools/hello", r#"{"size": 1}"#, 400, "invalid"),
        ("PATCH /v1/pools/hello", r#"{"min": "2"}"#, 400, "invalid"),
        ("PATCH /v1/pools/hello", "[]", 400, "invalid"),
        ("PATCH /v1/pools/hello", " [2, 3]", 400, "invalid"),
        ("PATCH /v1/pools/hello", "null", 400, "invalid"),
        ("PATCH /v1/pools/hello", "\"min\"", 400, "invalid"),
        ("PATCH /v1/pools/hello", &format!(r#"{{"weight": {UNSTORABLE}}}"#), 503, "not_stored"),
        ("PATCH /v1/pools/other", "{}", 404, "unknown_template"),
        ("GET /v1/pools/other", "", 404, "unknown_template"),
        ("DELETE /v1/pools/hello", "", 405, "method_not_allowed"),
    ] {
        let (got, said, message) = ask(&gateway, what, A, body).await.error();
        assert_eq!((got, said.as_str()), (status, code), "{what} {body}: {message}");
        let lists = ["an object with", "`min`", "`schedule`"].iter().all(|part| message.contains(part));
        assert_eq!(lists, status == 400 && !body.contains('{'), "{what} {body}: {message}");
    }
}

#[tokio::test]
async fn too_many_at_once_is_a_429_with_the_limit() {
    let refused =
        |template| ClaimError::Concurrency { template, limit: 3, retry_after: std::time::Duration::from_millis(6_100) };
    let gateway = gateway(Claims::Refused(refused)).await;
    let answer = ask(&gateway, "GET /invoke/hello/", A, "").await;
    let (status, code, message) = answer.error();
    assert_eq!((status, code.as_str()), (429, "concurrency"));
    assert!(message.contains("pool.concurrency"), "{message}");
    assert_eq!(answer.header("retry-after"), Some("7"), "in whole seconds, not too early");
    assert_eq!(answer.json()["error"]["limit"], 3);
}
