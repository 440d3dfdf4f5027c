//! What goes through unchanged, and what is put right.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::StreamExt as _;
use http::{Request, Response};
use http_body_util::{BodyExt as _, BodyStream, Full, StreamBody};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use stasis_gateway::Config;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

use crate::support::{Gateway, parse_answer, raw_guest, read_to};

/// Answers with the head that it got, as text, and the body behind it.
async fn mirror(stream: DuplexStream) {
    let service = service_fn(|request: Request<Incoming>| async move {
        let mut text = format!("{} {}\n", request.method(), request.uri());
        for (name, value) in request.headers() {
            text.push_str(&format!("{name}: {}\n", String::from_utf8_lossy(value.as_bytes())));
        }
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let whole = [text.as_bytes(), b"\n", &body].concat();
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(whole))))
    });
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

/// Sends every chunk back as it comes.
async fn echo(stream: DuplexStream) {
    let service = service_fn(|request: Request<Incoming>| async move {
        let chunks = BodyStream::new(request.into_body()).map(|frame| frame);
        Ok::<_, Infallible>(Response::new(StreamBody::new(chunks)))
    });
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

async fn says(mut stream: DuplexStream, answer: &str) {
    read_to(&mut stream, "\r\n\r\n").await;
    stream.write_all(answer.as_bytes()).await.unwrap();
}

#[tokio::test]
async fn method_path_query_headers_and_body_reach_the_function() {
    let gateway = Gateway::raw("pass", mirror).await;
    let answer = gateway
        .exchange(
            "PURGE /invoke/pass//a%2Fb/../%C3%A4;v=1?q=%20&r=a+b HTTP/1.1\r\nHost: shop.example:81\r\nX-Mine: one\r\n\
             x-mine: two\r\nX-Forwarded-For: 1.2.3.4\r\nX-Request-Id: mine-7\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\n\
             Keep-Alive: timeout=1\r\nTE: gzip, trailers\r\nProxy-Authorization: secret\r\nContent-Length: 5\r\n\r\nab\0\u{ff}c"
                .chars()
                .map(|c| c as u8)
                .collect::<Vec<u8>>(),
        )
        .await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let (head, body) = answer.body.split_at(answer.body.len() - 5);
    let head = std::str::from_utf8(head).unwrap();
    assert_eq!(body, b"ab\0\xffc");
    let mut lines: Vec<_> = head.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(lines.remove(0), "PURGE //a%2Fb/../%C3%A4;v=1?q=%20&r=a+b");
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "content-length: 5",
            "host: shop.example:81",
            "te: trailers",
            "x-forwarded-for: 1.2.3.4, 127.0.0.1",
            "x-forwarded-host: shop.example:81",
            "x-forwarded-proto: http",
            "x-mine: one",
            "x-mine: two",
            "x-request-id: mine-7",
        ]
    );
    assert_eq!(answer.header("x-request-id"), Some("mine-7"));
    gateway.until(|vms| vms.freed == 1).await;
    gateway.until_counted("pass", 200, "paused").await;
}

#[tokio::test]
async fn the_root_is_reached_without_a_slash() {
    let gateway = Gateway::raw("root", mirror).await;
    for (path, wanted) in [("/invoke/root", "GET /\n"), ("/invoke/root/", "GET /\n"), ("/invoke/root?a", "GET /?a\n")] {
        let answer = gateway.ask(&format!("GET {path}")).await;
        assert!(answer.text().starts_with(wanted), "{answer:?}");
    }
}

#[tokio::test]
async fn an_answer_keeps_its_status_and_headers_but_not_the_hop_s() {
    let gateway = Gateway::raw("answer", |stream| {
        says(
            stream,
            "HTTP/1.1 418 Short and stout\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\nConnection: X-Hop\r\nX-Hop: 1\r\n\
             Keep-Alive: timeout=9\r\nServer-Timing: db;dur=5\r\nX-Stasis-Start: lies\r\nX-Stasis-Vm: lies\r\n\
             X-Request-Id: lies\r\nContent-Length: 2\r\n\r\nhi",
        )
    })
    .await;
    let answer = gateway.ask("GET /invoke/answer").await;
    assert!(answer.head.starts_with("HTTP/1.1 418 Short and stout\r\n"), "{answer:?}");
    assert_eq!((answer.text(), answer.header("content-length")), ("hi", Some("2")));
    assert_eq!(answer.headers("set-cookie"), ["a=1", "b=2"]);
    assert_eq!((answer.header("x-hop"), answer.header("keep-alive")), (None, None));
    assert_eq!(answer.headers("x-stasis-start"), ["paused"]);
    assert_eq!(answer.headers("x-stasis-vm")[0].len(), 36);
    assert_eq!(answer.headers("x-request-id")[0].len(), 36);
    let timings = answer.headers("server-timing");
    assert_eq!((timings.len(), timings[0]), (2, "db;dur=5"));
    let guest =
        timings[1].strip_prefix("queue;dur=0.000, claim;dur=0.250, restore;dur=0.000, repair;dur=0.000, guest;dur=");
    let (_, decimals) = guest.unwrap().split_once('.').unwrap();
    assert!(decimals.len() == 3 && decimals.bytes().all(|digit| digit.is_ascii_digit()), "{timings:?}");
}

#[tokio::test]
async fn heads_without_bodies_are_left_alone() {
    let length = Gateway::raw("length", |stream| says(stream, "HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n")).await;
    let answer = length.ask("HEAD /invoke/length").await;
    assert_eq!((answer.status, answer.header("content-length"), answer.body.len()), (200, Some("7"), 0));
    let none = Gateway::raw("none", |stream| says(stream, "HTTP/1.1 200 OK\r\n\r\n")).await;
    let answer = none.ask("HEAD /invoke/none").await;
    assert_eq!((answer.status, answer.header("content-length"), answer.body.len()), (200, None, 0));
    let empty = Gateway::raw("empty", |stream| says(stream, "HTTP/1.1 204 No Content\r\n\r\n")).await;
    assert_eq!(empty.ask("GET /invoke/empty").await.status, 204);
    empty.until(|vms| vms.freed == 1).await;
}

#[tokio::test]
async fn an_old_server_s_answer_that_ends_with_its_connection_is_whole() {
    let gateway =
        Gateway::raw("old", |stream| says(stream, "HTTP/1.0 200 OK\r\nServer: BaseHTTP\r\n\r\nto the end")).await;
    let answer = gateway.ask("GET /invoke/old").await;
    assert!(answer.head.starts_with("HTTP/1.1 200 OK"), "{answer:?}");
    assert_eq!(answer.header("transfer-encoding"), Some("chunked"));
    assert_eq!(answer.text(), "A\r\nto the end\r\n0\r\n\r\n");
}

#[tokio::test]
async fn bodies_stream_both_ways_at_once() {
    let gateway = Gateway::raw("stream", echo).await;
    let mut client = gateway.connect().await;
    let head = "POST /invoke/stream HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    for word in ["first", "other", "third"] {
        client.write_all(format!("5\r\n{word}\r\n").as_bytes()).await.unwrap();
        let seen = read_to(&mut client, word).await;
        assert!(seen.contains(word), "{seen}");
        assert_eq!(gateway.until(|_| true).await.freed, 0);
    }
    client.write_all(b"0\r\n\r\n").await.unwrap();
    assert!(read_to(&mut client, "0\r\n\r\n").await.ends_with("0\r\n\r\n"));
    gateway.until(|vms| vms.freed == 1).await;
}

#[tokio::test]
async fn ten_megabytes_survive_the_way_there_and_back() {
    let gateway = Gateway::raw("large", echo).await;
    let body: Vec<u8> = (0..2_500_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let (mut read, mut write) = gateway.connect().await.into_split();
    let head =
        format!("PUT /invoke/large HTTP/1.0\r\nHost: h\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    let sent = body.clone();
    let sending = tokio::spawn(async move {
        write.write_all(head.as_bytes()).await.unwrap();
        write.write_all(&sent).await.unwrap();
        write
    });
    let mut bytes = Vec::new();
    read.read_to_end(&mut bytes).await.unwrap();
    drop(sending.await.unwrap());
    let answer = parse_answer(&bytes);
    assert_eq!(answer.status, 200);
    assert!(answer.body == body, "{} bytes came back", answer.body.len());
}

#[tokio::test]
async fn an_answer_before_the_body_was_read_arrives() {
    let gateway =
        Gateway::raw("early", |stream| says(stream, "HTTP/1.1 403 No\r\nContent-Length: 4\r\n\r\nnope")).await;
    let head = "POST /invoke/early HTTP/1.1\r\nHost: h\r\nContent-Length: 4000000\r\nConnection: close\r\n\r\n";
    let mut client = gateway.connect().await;
    client.write_all(head.as_bytes()).await.unwrap();
    client.write_all(&vec![b'x'; 4_000_000]).await.unwrap();
    let answer = crate::support::read_answer(&mut client).await;
    assert_eq!((answer.status, answer.text()), (403, "nope"));
}

#[tokio::test]
async fn continue_is_sent_when_there_is_a_vm() {
    let gateway = Gateway::raw("expect", mirror).await;
    let mut client = gateway.connect().await;
    let head = "POST /invoke/expect HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\nConnection: close\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    assert!(read_to(&mut client, "\r\n\r\n").await.starts_with("HTTP/1.1 100 "));
    client.write_all(b"ok").await.unwrap();
    let answer = crate::support::read_answer(&mut client).await;
    assert!(answer.text().ends_with("\n\nok") && !answer.text().contains("expect:"), "{answer:?}");
}

#[tokio::test]
async fn http2_callers_reach_an_http1_function() {
    let gateway = Gateway::start("two", "", Config::default(), raw_guest(mirror)).await;
    let io = TokioIo::new(gateway.connect().await);
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    let request = Request::post("http://two.example/invoke/two/a?b")
        .header("cookie", "a=1")
        .header("cookie", "b=2")
        .body(Full::new(Bytes::from_static(b"body")))
        .unwrap();
    let answer = sender.send_request(request).await.unwrap();
    assert!(answer.headers().contains_key("server-timing"));
    let text = answer.into_body().collect().await.unwrap().to_bytes();
    let text = std::str::from_utf8(&text).unwrap();
    assert!(text.starts_with("POST /a?b\n") && text.ends_with("\n\nbody"), "{text}");
    assert!(text.contains("host: two.example\n") && text.contains("cookie: a=1; b=2\n"), "{text}");
}
