//! Callers that leave, and a gateway that is told to.

use std::time::Duration;

use stasis_gateway::Config;
use tokio::{
    io::{AsyncWriteExt as _, DuplexStream},
    time::timeout,
};

use crate::support::{Claims, Gateway, PATIENCE, raw_guest, read_answer, read_to};

async fn hangs(mut stream: DuplexStream) {
    while !read_to(&mut stream, "never").await.is_empty() {}
}

async fn begins(mut stream: DuplexStream) {
    read_to(&mut stream, "\r\n\r\n").await;
    stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n").await.unwrap();
    hangs(stream).await;
}

#[tokio::test]
async fn who_leaves_before_the_answer_frees_the_vm() {
    let large =
        format!("POST /invoke/gone-post HTTP/1.1\r\nHost: h\r\nContent-Length: 500000\r\n\r\n{}", "x".repeat(500_000));
    for (name, request) in [
        ("gone-get", "GET /invoke/gone-get HTTP/1.1\r\nHost: h\r\n\r\n"),
        ("gone-post", &large),
        ("gone-cut", "POST /invoke/gone-cut HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nhalf"),
        (
            "gone-chunk",
            "POST /invoke/gone-chunk HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        ),
    ] {
        let gateway = Gateway::raw(name, hangs).await;
        let mut client = gateway.connect().await;
        client.write_all(request.as_bytes()).await.unwrap();
        gateway.until(|vms| vms.held == 1).await;
        drop(client);
        gateway.until(|vms| vms.freed == 1).await;
        assert_eq!(gateway.reports(), [], "{name}: the function is not to blame");
        gateway.until_counted(name, 499, "paused").await;
    }
}

#[tokio::test]
async fn who_leaves_in_the_queue_gives_the_place_up() {
    for (name, request) in [
        ("queue-get", "GET /invoke/queue-get HTTP/1.1\r\nHost: h\r\n\r\n"),
        ("queue-post", "POST /invoke/queue-post HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nbody"),
        ("queue-cut", "POST /invoke/queue-cut HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nbody"),
    ] {
        let gateway = Gateway::start(name, "", Config::default(), Claims::Queued).await;
        let mut client = gateway.connect().await;
        client.write_all(request.as_bytes()).await.unwrap();
        gateway.until(|vms| vms.asked == 1).await;
        drop(client);
        gateway.until(|vms| vms.given_up == 1).await;
        gateway.until_counted(name, 499, "none").await;
    }
}

#[tokio::test]
async fn who_leaves_in_the_midst_of_an_answer_frees_the_vm() {
    let gateway = Gateway::raw("midst", begins).await;
    let mut client = gateway.connect().await;
    client.write_all(b"GET /invoke/midst HTTP/1.1\r\nHost: h\r\n\r\n").await.unwrap();
    read_to(&mut client, "first").await;
    assert_eq!(gateway.until(|_| true).await.held, 1);
    drop(client);
    gateway.until(|vms| vms.freed == 1).await;
    gateway.until_counted("midst", 499, "paused").await;
}

#[tokio::test]
async fn a_connection_is_kept_for_the_next_request() {
    let gateway = Gateway::raw("keep", |mut stream| async move {
        read_to(&mut stream, "\r\n\r\n").await;
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nagain").await.unwrap();
    })
    .await;
    let mut client = gateway.connect().await;
    for round in 1..=3 {
        client.write_all(b"POST /invoke/keep HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nok").await.unwrap();
        assert!(read_to(&mut client, "again").await.starts_with("HTTP/1.1 200"));
        gateway.until(|vms| vms.freed == round).await;
    }
}

#[tokio::test]
async fn a_stop_lets_requests_finish() {
    let (go, told) = tokio::sync::watch::channel(false);
    let gateway = Gateway::raw("finish", move |mut stream| {
        let mut told = told.clone();
        async move {
            read_to(&mut stream, "\r\n\r\n").await;
            told.wait_for(|go| *go).await.unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ndone").await.unwrap();
        }
    })
    .await;
    let mut client = gateway.connect().await;
    client.write_all(b"GET /invoke/finish HTTP/1.1\r\nHost: h\r\n\r\n").await.unwrap();
    gateway.until(|vms| vms.held == 1).await;
    let Gateway { stop, stopped, address, .. } = gateway;
    stop.send(()).unwrap();
    while tokio::net::TcpStream::connect(address).await.is_ok() {}
    go.send(true).unwrap();
    assert_eq!(read_answer(&mut client).await.text(), "done");
    timeout(PATIENCE, stopped).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_stop_cuts_what_does_not_finish() {
    let config = Config { drain: Duration::from_millis(50), ..Config::default() };
    let gateway = Gateway::start("cut", "", config, raw_guest(begins)).await;
    let mut client = gateway.connect().await;
    client.write_all(b"GET /invoke/cut HTTP/1.1\r\nHost: h\r\n\r\n").await.unwrap();
    read_to(&mut client, "first").await;
    let mut vms = gateway.node.vms.subscribe();
    gateway.stop.send(()).unwrap();
    timeout(PATIENCE, gateway.stopped).await.unwrap().unwrap();
    timeout(PATIENCE, vms.wait_for(|vms| vms.freed == 1)).await.unwrap().unwrap();
}
