//! Requests that are wrong: exact statuses and bodies.

use http_body_util::Full;
use hyper::{Request, StatusCode};
use serde_json::{Value, json};

use crate::rig::{Rig, frame, request, shell};

#[tokio::test]
async fn unary_calls_that_are_wrong() {
    let rig = Rig::new().await;
    let bad = |message: &str| (StatusCode::BAD_REQUEST, json!({"code": "invalid_argument", "message": message}));
    for (method, body, wanted) in [
        ("List", "", bad("unmarshal message: EOF while parsing a value at line 1 column 0")),
        ("List", "{", bad("unmarshal message: EOF while parsing an object at line 1 column 1")),
        (
            "SendInput",
            r#"{"process":{"pid":-1}}"#,
            bad("unmarshal message: expected a number from 0 to 4294967295 at line 1 column 21"),
        ),
        (
            "SendInput",
            r#"{"process":7}"#,
            bad("unmarshal message: invalid type: integer `7`, expected struct Selector at line 1 column 12"),
        ),
        (
            "SendInput",
            r#"{"process":{},"input":{"stdin":"YQ=="}}"#,
            bad("the process is not selected: its pid or tag is missing"),
        ),
        ("SendInput", r#"{"input":{"stdin":"%"}}"#, bad("unmarshal message: expected base64 at line 1 column 22")),
        (
            "SendInput",
            r#"{"process":{"pid":4294967295}}"#,
            (StatusCode::NOT_FOUND, json!({"code": "not_found", "message": "process with pid 4294967295 not found"})),
        ),
        (
            "SendSignal",
            r#"{"process":{"tag":"t"},"signal":"SIGNAL_SIGTERM"}"#,
            (StatusCode::NOT_FOUND, json!({"code": "not_found", "message": "process with tag t not found"})),
        ),
    ] {
        let request = request(&format!("process.Process/{method}"), "application/json", &[], body);
        let (status, answer) = rig.answer(request).await;
        assert_eq!((status, serde_json::from_slice::<Value>(&answer).unwrap()), wanted, "{method} {body}");
    }
    let invalid = request("process.Process/List", "application/json", &[], &b"{\"a\":\"\xff\xfe\"}"[..]);
    let (status, answer) = rig.answer(invalid).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(&answer[..], br#"{"code":"invalid_argument","message":"unmarshal message: invalid UTF-8"}"#);
}

#[tokio::test]
async fn heads_that_are_wrong() {
    let rig = Rig::new().await;
    let json_type = "application/json";
    for (path, content_type, headers, status, body) in [
        (
            "process.Process/List",
            "application/proto",
            &[][..],
            415,
            r#"{"code":415,"message":"unsupported content type 'application/proto', expected application/json"}"#,
        ),
        (
            "process.Process/Start",
            json_type,
            &[],
            415,
            r#"{"code":415,"message":"unsupported content type 'application/json', expected application/connect+json"}"#,
        ),
        (
            "process.Process/Nothing",
            json_type,
            &[],
            404,
            r#"{"code":404,"message":"nothing is served at /process.Process/Nothing"}"#,
        ),
        (
            "process.Process/List",
            json_type,
            &[("connect-protocol-version", "2")],
            400,
            r#"{"code":"invalid_argument","message":"connect-protocol-version must be \"1\": got \"2\""}"#,
        ),
        (
            "process.Process/List",
            json_type,
            &[("content-encoding", "br")],
            501,
            r#"{"code":"unimplemented","message":"unknown compression \"br\": supported encodings are identity"}"#,
        ),
    ] {
        let (answered, text) = rig.answer(request(path, content_type, headers, "{}")).await;
        assert_eq!((answered.as_u16(), String::from_utf8_lossy(&text).as_ref()), (status, body), "{path} {headers:?}");
    }
    let get = Request::get("/process.Process/List").header("host", "s").body(Full::default()).unwrap();
    let response = rig.send(get).await;
    assert_eq!(
        (response.status(), response.headers()["allow"].to_str().unwrap()),
        (StatusCode::METHOD_NOT_ALLOWED, "POST")
    );
    let large = "x".repeat(100_000);
    let (status, answer) = rig.answer(request("process.Process/List", json_type, &[("x-large", &large)], "{}")).await;
    assert_eq!(status, StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE);
    assert_eq!(&answer[..], br#"{"code":431,"message":"the request's head is larger than 65536 bytes"}"#);
}

#[tokio::test]
async fn messages_that_are_too_large_are_refused() {
    let rig = Rig::new().await;
    let large = vec![b' '; 16 * 1024 * 1024 + 1];
    let (status, answer) = rig.answer(request("process.Process/List", "application/json", &[], large)).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(
        &answer[..],
        br#"{"code":"resource_exhausted","message":"message is larger than configured max 16777216"}"#
    );
}

#[tokio::test]
async fn streams_that_are_wrong_end_with_the_error() {
    let rig = Rig::new().await;
    let home = rig.path("file");
    std::fs::write(&home, "").unwrap();
    let start = |change: &dyn Fn(&mut Value)| {
        let mut start = shell("echo");
        change(&mut start);
        frame(&start)
    };
    let file = home.display();
    for (body, headers, code, message) in [
        (vec![], &[][..], "invalid_argument", "protocol error: the request has no message".to_owned()),
        (vec![0, 0], &[], "invalid_argument", "protocol error: incomplete envelope: unexpected EOF".into()),
        (
            vec![0, 255, 255, 255, 255],
            &[],
            "resource_exhausted",
            "message size 4294967295 is larger than configured max 16777216".into(),
        ),
        (
            vec![1, 0, 0, 0, 0],
            &[],
            "internal",
            "protocol error: sent compressed message without compression support".into(),
        ),
        (start(&|start| start["process"] = json!({})), &[], "invalid_argument", "the command is empty".into()),
        (
            start(&|start| start["process"]["cwd"] = json!("/nowhere")),
            &[],
            "invalid_argument",
            "cwd '/nowhere' does not exist".into(),
        ),
        (
            start(&|start| start["process"]["cwd"] = json!("file")),
            &[],
            "invalid_argument",
            format!("cwd '{file}' is not a directory"),
        ),
        (
            start(&|start| start["process"]["cwd"] = json!("a\0b")),
            &[],
            "invalid_argument",
            "the path contains a zero byte".into(),
        ),
        (
            start(&|start| start["process"]["cmd"] = json!("/no/such")),
            &[],
            "invalid_argument",
            "error starting process '/no/such': No such file or directory (os error 2)".into(),
        ),
        (
            start(&|start| start["process"]["envs"] = json!({"A=B": ""})),
            &[],
            "invalid_argument",
            "\"A=B\" is not the name of a variable".into(),
        ),
        (
            start(&|start| start["pty"] = json!({"size": {"cols": 65536}})),
            &[],
            "invalid_argument",
            "a terminal has at most 65535 columns and rows".into(),
        ),
        (
            start(&|_| {}),
            &[("connect-timeout-ms", "soon")],
            "invalid_argument",
            "connect-timeout-ms must be a number of at most ten digits".into(),
        ),
        (
            start(&|_| {}),
            &[("connect-content-encoding", "gzip")],
            "unimplemented",
            "unknown compression \"gzip\": supported encodings are identity".into(),
        ),
        (start(&|_| {}), &[("authorization", "Basic Z2hvc3Q6")], "unauthenticated", "invalid username: 'ghost'".into()),
    ] {
        let (status, answer) =
            rig.answer(request("process.Process/Start", "application/connect+json", headers, body)).await;
        assert_eq!((status, answer.first()), (StatusCode::OK, Some(&2)), "{message}");
        let end: Value = serde_json::from_slice(&answer[5..]).unwrap();
        assert_eq!(end, json!({"error": {"code": code, "message": message}}));
    }
    let (_, listed) = rig.call("process.Process/List", &json!({})).await;
    assert_eq!(listed, json!({"processes": []}), "nothing was started");
    for (frames, code) in [
        (vec![frame(&json!({"data": {"input": {"stdin": "YQ=="}}}))], "invalid_argument"),
        (vec![frame(&json!({"start": {"process": {"pid": 4294967295u32}}}))], "not_found"),
        (vec![frame(&json!({}))], "unimplemented"),
    ] {
        let (_, answer) =
            rig.answer(request("process.Process/StreamInput", "application/connect+json", &[], frames.concat())).await;
        assert_eq!(serde_json::from_slice::<Value>(&answer[5..]).unwrap()["error"]["code"], code);
    }
}

#[tokio::test]
async fn signals_that_are_unknown_are_refused() {
    let rig = Rig::new().await;
    let mut stream = rig.stream("process.Process/Start", &json!({"process": {"cmd": "cat"}})).await;
    let pid = stream.pid().await;
    for (signal, name) in
        [(json!("SIGNAL_SIGHUP"), "SIGNAL_SIGHUP"), (json!(1), "1"), (json!(null), "SIGNAL_UNSPECIFIED")]
    {
        let answer = rig.call("process.Process/SendSignal", &json!({"process": {"pid": pid}, "signal": signal})).await;
        assert_eq!(
            answer,
            (
                StatusCode::NOT_IMPLEMENTED,
                json!({"code": "unimplemented", "message": format!("invalid signal: {name}")})
            )
        );
    }
    let answer = rig
        .call("process.Process/Update", &json!({"process": {"pid": pid}, "pty": {"size": {"cols": 1, "rows": 1}}}))
        .await;
    assert_eq!(
        answer,
        (StatusCode::BAD_REQUEST, json!({"code": "failed_precondition", "message": "tty not assigned to process"}))
    );
    let answer = rig.call("process.Process/SendInput", &json!({"process": {"pid": pid}, "input": {}})).await;
    assert_eq!(answer.0, StatusCode::NOT_IMPLEMENTED);
    assert_eq!(
        rig.call("process.Process/SendSignal", &json!({"process": {"pid": pid}, "signal": 9})).await.0,
        StatusCode::OK
    );
    assert_eq!(stream.rest().await.end.unwrap()["status"], "signal: killed");
}
