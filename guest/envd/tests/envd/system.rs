//! Health, metrics, variables, `/init`, and who may ask.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Request, StatusCode};
use serde_json::{Value, json};
use stasis_envd::Door;

use crate::rig::{Rig, frame, open, request, send, shell, within};

const TOKEN: &str = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0";
const REFUSED: &[u8] =
    br#"{"code":401,"message":"unauthorized access, please provide a valid access token or method signing if supported"}"#;

fn get(path: &str, token: Option<&str>) -> Request<Full<Bytes>> {
    let mut request = Request::get(path).header("host", "s");
    if let Some(token) = token {
        request = request.header("x-access-token", token);
    }
    request.body(Full::default()).unwrap()
}

async fn init(rig: &Rig, message: &Value) -> (StatusCode, String) {
    let (status, body) = rig.answer(request("init", "application/json", &[], message.to_string())).await;
    (status, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn health_is_for_everybody() {
    let rig = Rig::new().await;
    init(&rig, &json!({"accessToken": TOKEN})).await;
    assert_eq!(rig.answer(get("/health", None)).await, (StatusCode::NO_CONTENT, Bytes::new()));
}

#[tokio::test]
async fn metrics_are_the_guests() {
    let rig = Rig::new().await;
    let (status, body) = rig.answer(get("/metrics", None)).await;
    assert_eq!(status, StatusCode::OK);
    let metrics: Value = serde_json::from_slice(&body).unwrap();
    for name in [
        "ts",
        "cpu_count",
        "mem_total",
        "mem_used",
        "mem_cache",
        "mem_total_mib",
        "mem_used_mib",
        "disk_used",
        "disk_total",
    ] {
        assert!(metrics[name].as_u64().unwrap() > 0, "{name}: {metrics}");
    }
    assert!((0.0..=100.0).contains(&metrics["cpu_used_pct"].as_f64().unwrap()));
    assert!(metrics["mem_used"].as_u64() < metrics["mem_total"].as_u64());
}

#[tokio::test]
async fn variables_are_replaced_and_reach_processes() {
    let rig = Rig::new().await;
    assert_eq!(init(&rig, &json!({"envVars": {"A": "1", "B": "2"}})).await.0, StatusCode::NO_CONTENT);
    assert_eq!(init(&rig, &json!({"envVars": {"B": "3", "C": "4"}})).await.0, StatusCode::NO_CONTENT);
    // Nothing about them leaves them.
    assert_eq!(init(&rig, &json!({})).await.0, StatusCode::NO_CONTENT);
    assert_eq!(rig.answer(get("/envs", None)).await, (StatusCode::OK, Bytes::from_static(br#"{"B":"3","C":"4"}"#)));
    let mut start = shell("echo $A-$B-$C-$E2B_SANDBOX");
    start["process"]["envs"] = json!({"C": "5"});
    let mut stream = rig.stream("process.Process/Start", &start).await;
    stream.pid().await;
    assert_eq!(stream.rest().await.text(), "-3-5-true\n");
}

#[tokio::test]
async fn the_default_user_and_folder_are_told() {
    let rig = Rig::new().await;
    std::fs::create_dir(rig.path("work")).unwrap();
    init(&rig, &json!({"defaultUser": "user", "defaultWorkdir": rig.path("work")})).await;
    let mut stream = rig.run("pwd").await;
    stream.pid().await;
    assert_eq!(stream.rest().await.text(), format!("{}\n", rig.path("work").display()));
    init(&rig, &json!({"defaultUser": "ghost"})).await;
    let mut stream = rig.run("pwd").await;
    assert_eq!(
        stream.rest().await.error.unwrap(),
        json!({"code": "unauthenticated", "message": "invalid default user: 'ghost'"})
    );
}

#[tokio::test]
async fn the_clock_is_set_when_it_is_off_and_never_by_an_older_message() {
    let set = Arc::new(Mutex::new(Vec::new()));
    let clock = Arc::clone(&set);
    let rig = Rig::with(|config| {
        config.clock = Arc::new(move |time| {
            clock.lock().unwrap().push(humantime::format_rfc3339_seconds(time).to_string());
            Ok(())
        });
    })
    .await;
    for (time, name) in
        [("2126-01-01T00:00:02Z", "new"), ("2126-01-01T00:00:01Z", "old"), ("2126-01-01T00:00:03Z", "newer")]
    {
        let answer = init(&rig, &json!({"timestamp": time, "envVars": {"NAME": name}})).await;
        assert_eq!(answer, (StatusCode::NO_CONTENT, String::new()));
    }
    assert_eq!(*set.lock().unwrap(), ["2126-01-01T00:00:02Z", "2126-01-01T00:00:03Z"]);
    assert_eq!(rig.answer(get("/envs", None)).await.1, r#"{"NAME":"newer"}"#);
}

#[tokio::test]
async fn without_the_token_nothing_is_reached() {
    let rig = Rig::new().await;
    assert_eq!(init(&rig, &json!({"accessToken": TOKEN, "envVars": {"A": "1"}})).await.0, StatusCode::NO_CONTENT);
    for token in [None, Some(""), Some("wrong"), Some("0tQG31xiMp0IOQfaz9dcwi72L1CPo8e")] {
        for path in ["/envs", "/metrics", "/process.Process/List", "/nothing", "/health/"] {
            assert_eq!(
                rig.answer(get(path, token)).await,
                (StatusCode::UNAUTHORIZED, Bytes::from_static(REFUSED)),
                "{path}"
            );
        }
    }
    let start = request("process.Process/Start", "application/connect+json", &[], frame(&shell("true")));
    assert_eq!(rig.answer(start).await, (StatusCode::UNAUTHORIZED, Bytes::from_static(REFUSED)));
    assert_eq!(rig.answer(get("/envs", Some(TOKEN))).await, (StatusCode::OK, Bytes::from_static(br#"{"A":"1"}"#)));
}

#[tokio::test]
async fn a_token_is_changed_by_who_has_it_or_by_the_owner() {
    let rig = Rig::new().await;
    init(&rig, &json!({"accessToken": TOKEN})).await;
    let refused = |message: &str| (StatusCode::UNAUTHORIZED, format!(r#"{{"code":401,"message":"{message}"}}"#));
    assert_eq!(init(&rig, &json!({"accessToken": "other"})).await, refused("access token validation failed"));
    assert_eq!(init(&rig, &json!({"envVars": {}})).await, refused("access token reset not authorized"));
    assert_eq!(init(&rig, &json!({"accessToken": TOKEN, "envVars": {"A": "1"}})).await.0, StatusCode::NO_CONTENT);
    let (status, _) = rig
        .answer(request("init", "application/json", &[("x-access-token", TOKEN)], r#"{"accessToken":"other"}"#))
        .await;
    assert_eq!(status, StatusCode::UNAUTHORIZED, "the body's counts");
    // Through its own door the owner needs none, also for one that is not the first.
    let owner = open(&rig.envd, Door::Owner).await;
    let change = request("init", "application/json", &[], r#"{"accessToken":"other"}"#);
    assert_eq!(send(&owner, change).await.status(), StatusCode::NO_CONTENT);
    assert_eq!(rig.answer(get("/envs", Some(TOKEN))).await.0, StatusCode::UNAUTHORIZED);
    assert_eq!(rig.answer(get("/envs", Some("other"))).await.1, r#"{"A":"1"}"#);
}

/// Nothing of it is told back: it may hold secrets.
#[tokio::test]
async fn what_init_cannot_read_is_refused() {
    let rig = Rig::new().await;
    for (body, message) in [
        (&b"{"[..], "invalid request body at line 1 column 1"),
        (br#"{"accessToken":{"s3cret":1}}"#, "invalid request body at line 1 column 15"),
        (br#"{"envVars":{"A":7}}"#, "invalid request body at line 1 column 17"),
        (b"{\"x\":\"\xff\"}", "invalid request body: invalid UTF-8"),
        (br#"{"timestamp":"s3cret"}"#, "invalid timestamp: write it as 2026-01-31T23:59:59.5Z, in UTC"),
    ] {
        let (status, answer) = rig.answer(request("init", "application/json", &[], body)).await;
        let wanted = format!(r#"{{"code":400,"message":"{message}"}}"#);
        assert_eq!((status, str::from_utf8(&answer).unwrap()), (StatusCode::BAD_REQUEST, wanted.as_str()));
    }
    assert_eq!(rig.answer(request("init", "application/json", &[], "")).await.0, StatusCode::NO_CONTENT);
    let (status, _) = rig.answer(request("init", "application/json", &[], vec![b' '; 1024 * 1024 + 1])).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let (status, body) = rig.answer(get("/init", None)).await;
    assert_eq!(
        (status, &body[..]),
        (StatusCode::METHOD_NOT_ALLOWED, &br#"{"code":405,"message":"GET is not a method of /init"}"#[..])
    );
}

#[tokio::test]
async fn any_listener_will_do() {
    let rig = Rig::new().await;
    let listener = tokio::net::UnixListener::bind(rig.path("socket")).unwrap();
    let envd = rig.envd.clone();
    tokio::spawn(async move { stasis_envd::serve(listener, envd, Door::Owner).await });
    let stream = tokio::net::UnixStream::connect(rig.path("socket")).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let response = within("the answer", sender.send_request(get("/health", None))).await.unwrap();
    assert_eq!(response.status(), StatusCode::NO_CONTENT);
}
