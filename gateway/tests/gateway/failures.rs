//! Each way to fail, and what the caller is told.

use std::time::Duration;

use stasis_gateway::Config;
use stasis_pool_api::{ClaimError, NoCapacity, Resource, TemplateName};
use tokio::io::{AsyncWriteExt as _, DuplexStream};

use crate::support::{Claims, Gateway, raw_guest, read_answer, read_to};

const ID: &str = "X-Request-Id: id-1\r\n";

async fn says_and_goes(mut stream: DuplexStream, answer: &str) {
    read_to(&mut stream, "\r\n\r\n").await;
    stream.write_all(answer.as_bytes()).await.unwrap();
}

async fn hangs(mut stream: DuplexStream) {
    while !read_to(&mut stream, "never").await.is_empty() {}
    std::future::pending().await
}

fn small() -> Config {
    Config { max_body: 1000, ..Config::default() }
}

#[tokio::test]
async fn an_unknown_template_is_404_with_the_list() {
    let gateway = Gateway::raw("known", hangs).await;
    for path in ["/invoke/other", "/invoke/other/a", "/invoke/Kn%20own", "/invoke/", "/invoke//a"] {
        let answer = gateway.ask(&format!("POST {path}")).await;
        let (status, code, message) = answer.error();
        assert_eq!((status, code.as_str()), (404, "unknown_template"), "{path}");
        assert!(message.contains("/v1/templates"), "{message}");
        assert_eq!(answer.json()["error"]["list"], "/v1/templates");
    }
    assert_eq!(gateway.until(|_| true).await.asked, 0);
}

#[tokio::test]
async fn a_declared_body_over_the_limit_is_413_and_claims_nothing() {
    let gateway = Gateway::start("declared", "", small(), raw_guest(hangs)).await;
    let mut client = gateway.connect().await;
    let head = "POST /invoke/declared HTTP/1.1\r\nHost: h\r\nContent-Length: 2000000\r\nConnection: close\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    // The caller sends all of it before it reads, as many do.
    client.write_all(&vec![0; 2_000_000]).await.unwrap();
    let answer = read_answer(&mut client).await;
    let (status, code, message) = answer.error();
    assert_eq!((status, code.as_str()), (413, "body_too_large"));
    assert!(message.contains("1000 bytes"), "{message}");
    assert_eq!(gateway.until(|_| true).await.asked, 0);
    gateway.until_counted("declared", 413, "none").await;
}

#[tokio::test]
async fn a_caller_that_waits_for_continue_gets_413_instead() {
    let gateway = Gateway::start("waits", "", small(), raw_guest(hangs)).await;
    let head = "POST /invoke/waits HTTP/1.1\r\nHost: h\r\nContent-Length: 2000\r\nExpect: 100-continue\r\n\r\n";
    assert_eq!(gateway.exchange(head).await.error().0, 413);
}

#[tokio::test]
async fn a_chunked_body_that_passes_the_limit_is_413_and_frees_the_vm() {
    let gateway = Gateway::start("chunked", "", small(), raw_guest(hangs)).await;
    let mut client = gateway.connect().await;
    let head = "POST /invoke/chunked HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    client.write_all(format!("1f4\r\n{}\r\n", "x".repeat(500)).as_bytes()).await.unwrap();
    gateway.until(|vms| vms.held == 1).await;
    client.write_all(format!("1f5\r\n{}\r\n0\r\n\r\n", "y".repeat(501)).as_bytes()).await.unwrap();
    let answer = read_answer(&mut client).await;
    let (status, code, message) = answer.error();
    assert_eq!((status, code.as_str()), (413, "body_too_large"));
    assert!(message.contains("1000 bytes"), "{message}");
    gateway.until(|vms| vms.freed == 1).await;
    assert_eq!(gateway.reports(), [], "the function is not to blame");
}

#[tokio::test]
async fn no_answer_in_time_is_504() {
    let gateway = Gateway::start("slow", "timeout = '1s'", Config::default(), raw_guest(hangs)).await;
    let answer = gateway.ask("GET /invoke/slow").await;
    let (status, code, message) = answer.error();
    assert_eq!((status, code.as_str()), (504, "function_timeout"));
    assert!(message.contains("1s") && message.contains("template.toml"), "{message}");
    assert_eq!(answer.header("x-failed-component"), Some("function"));
    assert_eq!(answer.header("x-stasis-start"), Some("paused"));
    gateway.until(|vms| vms.freed == 1).await;
}

#[tokio::test]
async fn an_exhausted_pool_is_429_with_the_time_to_come_back() {
    let refused = |template: TemplateName| ClaimError::Exhausted {
        template,
        waited: Duration::from_secs(10),
        bound: "pool.max = 32".into(),
        retry_after: Duration::from_millis(1200),
    };
    let gateway = Gateway::start("full", "", Config::default(), Claims::Refused(refused)).await;
    let answer = gateway.ask("GET /invoke/full").await;
    let (status, code, message) = answer.error();
    assert_eq!((status, code.as_str(), answer.header("retry-after")), (429, "exhausted", Some("2")));
    assert!(message.contains("pool.max = 32"), "{message}");
}

#[tokio::test]
async fn a_full_node_is_429_and_names_what_is_short() {
    let refused = |template: TemplateName| ClaimError::NoCapacity {
        template,
        full: NoCapacity { resource: Resource::Memory, needed: 300 << 20, available: 1 << 20, limit: 1 << 30 },
        retry_after: Duration::from_secs(7),
    };
    let gateway = Gateway::start("crowded", "", Config::default(), Claims::Refused(refused)).await;
    let answer = gateway.ask("GET /invoke/crowded").await;
    let (status, code, message) = answer.error();
    assert_eq!((status, code.as_str(), answer.header("retry-after")), (429, "no_capacity", Some("7")));
    assert!(message.contains("300.0 MiB of memory needed, 1.0 MiB of 1.0 GiB available"), "{message}");
    let error = &answer.json()["error"];
    assert_eq!(error["resource"], "memory");
    assert_eq!((&error["needed"], &error["available"]), (&(300 << 20).into(), &(1 << 20).into()));
}

#[tokio::test]
async fn a_start_that_would_come_too_late_is_429_and_says_when_to_ask_again() {
    let refused = |template: TemplateName| ClaimError::NoCapacity {
        template,
        full: NoCapacity { resource: Resource::Starts, needed: 9, available: 8, limit: 4 },
        retry_after: Duration::from_secs(3),
    };
    let gateway = Gateway::start("late", "", Config::default(), Claims::Refused(refused)).await;
    let answer = gateway.ask("GET /invoke/late").await;
    let (status, code, message) = answer.error();
    assert_eq!((status, code.as_str(), answer.header("retry-after")), (429, "no_capacity", Some("3")));
    assert!(message.contains("number 9 in the line, 8 can be done"), "{message}");
    assert_eq!(answer.json()["error"]["resource"], "starts");
}

#[tokio::test]
async fn retry_after_is_never_zero() {
    let refused = |template: TemplateName| ClaimError::Exhausted {
        template,
        waited: Duration::ZERO,
        bound: String::new(),
        retry_after: Duration::ZERO,
    };
    let gateway = Gateway::start("zero", "", Config::default(), Claims::Refused(refused)).await;
    assert_eq!(gateway.ask("GET /invoke/zero").await.header("retry-after"), Some("1"));
}

#[tokio::test]
async fn a_broken_template_is_503() {
    let refused = |template: TemplateName| ClaimError::Broken { template, reason: "image altered".into() };
    let gateway = Gateway::start("broken", "", Config::default(), Claims::Refused(refused)).await;
    let answer = gateway.ask("GET /invoke/broken").await;
    let (status, code, message) = answer.error();
    assert_eq!((status, code.as_str()), (503, "template_broken"));
    assert!(message.contains("image altered") && answer.header("retry-after").is_some(), "{message}");
}

#[tokio::test]
async fn a_function_that_dies_before_or_in_a_small_answer_is_502() {
    for (name, said) in [
        ("silent", ""),
        ("half-head", "HTTP/1.1 200 OK\r\nContent-Le"),
        ("half-body", "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nfive5"),
        ("not-http", "SSH-2.0-OpenSSH_9\r\n\r\n"),
        ("upgrade", "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"),
    ] {
        let gateway = Gateway::raw(name, move |stream| says_and_goes(stream, said)).await;
        let request = format!("GET /invoke/{name} HTTP/1.1\r\nHost: h\r\n{ID}Connection: close\r\n\r\n");
        let answer = gateway.exchange(request).await;
        let (status, code, _) = answer.error();
        assert_eq!((status, code.as_str()), (502, "function_failed"), "{name}");
        assert_eq!(answer.header("x-failed-component"), Some("function"));
        gateway.until(|vms| vms.freed == 1).await;
        let reports = gateway.reports();
        assert!(reports.len() == 1 && reports[0].0 == "id-1" && !reports[0].1.is_empty(), "{name}: {reports:?}");
        gateway.until_counted(name, 502, "paused").await;
    }
}

#[tokio::test]
async fn a_function_that_dies_in_a_streamed_answer_cuts_the_caller_off() {
    for (name, said) in [
        ("chunks", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n"),
        ("long", "HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nfirst"),
    ] {
        let gateway = Gateway::raw(name, move |stream| says_and_goes(stream, said)).await;
        let answer = gateway.ask(&format!("GET /invoke/{name}")).await;
        assert_eq!(answer.status, 200);
        assert!(!answer.text().ends_with("0\r\n\r\n"), "a clean end: {answer:?}");
        gateway.until(|vms| vms.freed == 1).await;
        assert_eq!(gateway.reports().len(), 1);
        gateway.until_counted(name, 502, "paused").await;
    }
}

#[tokio::test]
async fn a_small_answer_that_comes_slowly_is_no_failure() {
    let gateway = Gateway::start(
        "dribble",
        "timeout = '1s'",
        Config::default(),
        raw_guest(|mut stream| async move {
            read_to(&mut stream, "\r\n\r\n").await;
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nfirst").await.unwrap();
            tokio::time::sleep(Duration::from_millis(1300)).await;
            stream.write_all(b"other").await.unwrap();
            std::future::pending().await
        }),
    )
    .await;
    let answer = gateway.ask("GET /invoke/dribble").await;
    assert_eq!((answer.status, answer.text()), (200, "firstother"));
}

#[tokio::test]
async fn a_head_that_is_too_large_is_431() {
    let gateway = Gateway::raw("head", hangs).await;
    let answer = gateway
        .exchange(format!("GET /invoke/head HTTP/1.1\r\nHost: h\r\nX-Long: {}\r\n\r\n", "x".repeat(200_000)))
        .await;
    assert_eq!(answer.status, 431);
}

#[tokio::test]
async fn a_bug_is_500_and_costs_one_request() {
    let gateway = Gateway::start("bug", "", Config::default(), Claims::Refused(|_| panic!("on purpose"))).await;
    let mut client = gateway.connect().await;
    for _ in 0..2 {
        client.write_all(b"GET /invoke/bug HTTP/1.1\r\nHost: h\r\n\r\n").await.unwrap();
        assert!(read_to(&mut client, "\"request_id\"").await.starts_with("HTTP/1.1 500 "));
    }
}
