//! What is no request: hyper answers it by itself, before there is one that could have an id (docs/api.md, "Errors").

use stasis_gateway::Config;

use crate::support::{Claims, Gateway};

#[tokio::test]
async fn what_is_no_request_has_a_status_and_nothing_else() {
    let gateway = Gateway::start("hello", "", Config::default(), Claims::Queued).await;
    let many: String = (0..101).map(|number| format!("X-{number}: 1\r\n")).collect();
    for (request, status) in [
        ("what is this\r\n\r\n".to_owned(), 400),
        ("GET /healthz HTTP/1.1\r\nno colon\r\n\r\n".to_owned(), 400),
        ("GET /healthz HTTP/9.9\r\nHost: h\r\n\r\n".to_owned(), 400),
        ("POST /healthz HTTP/1.1\r\nContent-Length: one\r\n\r\n".to_owned(), 400),
        (format!("GET /healthz HTTP/1.1\r\n{many}\r\n"), 431),
        (format!("GET /{} HTTP/1.1\r\nHost: h\r\n\r\n", "x".repeat(65_535)), 414),
    ] {
        let answer = gateway.exchange(&request).await;
        let seen = (answer.status, answer.text(), answer.header("x-request-id"), answer.header("connection"));
        assert_eq!(seen, (status, "", None, Some("close")), "{:.60}: {answer:?}", request);
    }
    assert_eq!(gateway.ask("GET /healthz").await.status, 200, "others are served on");
}
