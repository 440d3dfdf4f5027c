//! Sandboxes: statuses and bodies of the API, before a node that has none, and one that is always suspended.

use std::time::Duration;

use futures_util::{FutureExt as _, future::BoxFuture};
use stasis_gateway::Config;
use stasis_pool_api::{
    Claim, Command, CommandEvent, CommandEvents, Lease, Name, NewSandbox, NoCapacity, PauseTo, Resource, SandboxError,
    SandboxInfo, SandboxLogs, SandboxState, Sandboxes, StartKind, TemplateName, Timings, Written,
};
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::support::{Claims, Gateway, template};

/// Of a sandbox that was killed under its request.
struct Taken;

impl Lease for Taken {
    fn report_failure(&self, _: &str, reason: &str) {
        panic!("the function is blamed: {reason}");
    }

    fn taken_back(&self) -> Option<SandboxError> {
        Some(SandboxError::Gone { id: "killed".parse().unwrap() })
    }
}

/// Knows `asleep`, which can do nothing, and no other.
pub(crate) struct NoSandboxes;

type Answer<'a, T> = BoxFuture<'a, Result<T, SandboxError>>;

fn refuse<T: Send + 'static>(id: &str) -> Answer<'static, T> {
    let error = match id {
        "unwritten" => SandboxError::Store { reason: "database or disk is full".into() },
        "crowded" => SandboxError::NoCapacity {
            id: id.parse().unwrap(),
            wanted: "be resumed",
            full: NoCapacity { resource: Resource::Vcpus, needed: 2, available: 1, limit: 8 },
            retry_after: Duration::from_secs(9),
        },
        "asleep" => {
            SandboxError::State { id: id.parse().unwrap(), state: SandboxState::Suspended, wanted: "be paused" }
        }
        "gone" => SandboxError::Gone { id: id.parse().unwrap() },
        "cut" => SandboxError::Cut { id: id.parse().unwrap() },
        "deaf" => SandboxError::Guest { id: id.parse().unwrap(), reason: "no answer".into() },
        "full" => SandboxError::Command { id: id.parse().unwrap(), reason: "16 run".into() },
        "bare" => SandboxError::NoExec { id: id.parse().unwrap(), template: "hello".parse().unwrap() },
        "broken" => SandboxError::NotDone { id: id.parse().unwrap(), wanted: "be resumed", reason: "no file".into() },
        _ => SandboxError::Unknown { id: id.to_owned() },
    };
    async move { Err(error) }.boxed()
}

impl Sandboxes for NoSandboxes {
    fn create(&self, new: NewSandbox, _: Duration) -> Answer<'_, SandboxInfo> {
        refuse(new.template.as_str())
    }
    fn list(&self, _: Option<SandboxState>) -> BoxFuture<'_, Vec<SandboxInfo>> {
        async { Vec::new() }.boxed()
    }
    fn template_of(&self, id: &str) -> Option<TemplateName> {
        ["asleep", "killed"].contains(&id).then(|| "hello".parse().unwrap())
    }
    fn inspect<'a>(&'a self, id: &'a str) -> Answer<'a, SandboxInfo> {
        refuse(id)
    }
    fn pause<'a>(&'a self, id: &'a str, _: PauseTo) -> Answer<'a, SandboxInfo> {
        refuse(id)
    }
    fn resume<'a>(&'a self, id: &'a str, _: Option<Duration>) -> Answer<'a, (SandboxInfo, bool)> {
        refuse(id)
    }
    fn timeout<'a>(&'a self, id: &'a str, _: Duration) -> Answer<'a, SandboxInfo> {
        refuse(id)
    }
    fn hold<'a>(&'a self, id: &'a str, _: Name, _: Option<Duration>) -> Answer<'a, SandboxInfo> {
        refuse(id)
    }
    fn release<'a>(&'a self, id: &'a str, _: Name) -> Answer<'a, SandboxInfo> {
        refuse(id)
    }
    fn fork<'a>(&'a self, id: &'a str, _: u32, _: Duration) -> Answer<'a, Vec<SandboxInfo>> {
        refuse(id)
    }
    fn kill<'a>(&'a self, id: &'a str) -> Answer<'a, ()> {
        refuse(id)
    }
    fn visit<'a>(&'a self, id: &'a str, _: Duration) -> Answer<'a, Claim> {
        if id != "killed" {
            return refuse(id);
        }
        async {
            Ok(Claim {
                vm: Uuid::new_v4(),
                template: template("hello", ""),
                start: StartKind::Running,
                timings: Timings::default(),
                // Its other end is gone.
                stream: Box::new(tokio::io::duplex(1).0),
                lease: Box::new(Taken),
            })
        }
        .boxed()
    }
    fn exec<'a>(&'a self, id: &'a str, command: Command, _: Duration) -> Answer<'a, CommandEvents> {
        if id != "awake" {
            return refuse(id);
        }
        async move {
            let (events, told) = mpsc::channel(4);
            let said = format!("{} {}", command.command.join(" "), command.stdin);
            events.send(CommandEvent::Stdout(Written(said.into()))).await.unwrap();
            events.send(CommandEvent::Stderr(Written(b"\xff".as_slice().into()))).await.unwrap();
            events.send(CommandEvent::Exited { status: 3 }).await.unwrap();
            Ok(told)
        }
        .boxed()
    }
    fn logs<'a>(&'a self, id: &'a str) -> Answer<'a, SandboxLogs> {
        match id {
            "awake" => async { Ok(SandboxLogs { output: Some("printed".into()), console: None }) }.boxed(),
            _ => refuse(id),
        }
    }
}

async fn gateway() -> Gateway {
    Gateway::start("hello", "", Config::default(), Claims::Queued).await
}

#[tokio::test]
async fn one_that_is_not_there_is_a_404_that_says_so() {
    let gateway = gateway().await;
    for ask in [
        "GET /v1/sandboxes/sb-1",
        "DELETE /v1/sandboxes/sb-1",
        "POST /v1/sandboxes/sb-1/pause",
        "POST /v1/sandboxes/sb-1/resume",
        "POST /v1/sandboxes/sb-1/fork",
        "DELETE /v1/sandboxes/sb-1/hold/ci",
        "GET /sandbox/sb-1/path",
        "POST /sandbox/sb-1",
    ] {
        let (status, code, message) = gateway.ask(ask).await.error();
        assert_eq!((status, code.as_str()), (404, "unknown_sandbox"), "{ask}");
        assert!(message.contains("/v1/sandboxes"), "{ask}: {message}");
    }
}

#[tokio::test]
async fn a_wrong_state_is_a_409_that_names_it_and_what_is_possible() {
    let gateway = gateway().await;
    for ask in ["POST /v1/sandboxes/asleep/pause", "GET /sandbox/asleep/path"] {
        let answer = gateway.ask(ask).await;
        let (status, code, _) = answer.error();
        assert_eq!((status, code.as_str()), (409, "wrong_state"), "{ask}");
        let error = &answer.json()["error"];
        assert_eq!(
            (&error["state"], &error["allowed"]),
            (&"suspended".into(), &"pause to disk, resume, timeout, hold, release, logs, kill".into())
        );
    }
}

#[tokio::test]
async fn a_command_s_output_and_end_are_lines_of_json() {
    let gateway = gateway().await;
    let exec = async |body: &str| {
        let length = body.len();
        let head = "POST /v1/sandboxes/awake/exec HTTP/1.1\r\nHost: h\r\nConnection: close";
        gateway.exchange(format!("{head}\r\nContent-Length: {length}\r\n\r\n{body}")).await
    };
    let answer = exec(r#"{"command":["cat","-n"],"stdin":"x"}"#).await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/x-ndjson")));
    let lines: Vec<_> = answer.text().lines().filter(|line| line.starts_with('{')).collect();
    let wanted = [
        r#"{"event":"stdout","text":"cat -n x"}"#,
        r#"{"event":"stderr","base64":"/w=="}"#,
        r#"{"event":"exited","status":3}"#,
    ];
    assert_eq!(lines, wanted);
    assert_eq!(exec(r#"{"program":"ls"}"#).await.error().0, 400);
    assert_eq!(gateway.ask("GET /v1/sandboxes/awake/logs").await.json()["output"], "printed");
    assert_eq!(gateway.ask("GET /v1/sandboxes/sb-1/logs").await.error().0, 404);
}

#[tokio::test]
async fn a_store_that_cannot_be_written_is_a_503_that_says_so() {
    let gateway = gateway().await;
    let create = r#"{"template":"unwritten"}"#;
    let length = create.len();
    let create = format!(
        "POST /v1/sandboxes HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{create}"
    );
    let answers = [gateway.exchange(create).await, gateway.ask("POST /v1/sandboxes/unwritten/pause").await];
    for answer in answers {
        let (status, code, message) = answer.error();
        assert_eq!((status, code.as_str()), (503, "store_unavailable"));
        assert!(message.contains("disk is full") && message.contains("what runs goes on"), "{message}");
        assert_eq!(answer.header("retry-after"), Some("5"));
    }
}

#[tokio::test]
async fn one_for_which_there_is_no_room_is_a_429_that_names_what_is_short() {
    let answer = gateway().await.ask("POST /v1/sandboxes/crowded/resume").await;
    let (status, code, message) = answer.error();
    assert_eq!((status, code.as_str(), answer.header("retry-after")), (429, "no_capacity", Some("9")));
    assert!(message.contains("2 vCPUs needed, 1 of 8 available"), "{message}");
    assert_eq!(answer.json()["error"]["resource"], "vcpus");
}

#[tokio::test]
async fn a_list_takes_a_state_and_nothing_else() {
    let gateway = gateway().await;
    assert_eq!(gateway.ask("GET /v1/sandboxes?state=running").await.json()["sandboxes"], serde_json::json!([]));
    for ask in ["GET /v1/sandboxes?state=asleep", "GET /v1/sandboxes?stat=running"] {
        assert_eq!(gateway.ask(ask).await.error().0, 400, "{ask}");
    }
    // No body, or not what is needed.
    for ask in ["POST /v1/sandboxes", "POST /v1/sandboxes/asleep/timeout", "POST /v1/sandboxes/asleep/hold"] {
        let (status, code, message) = gateway.ask(ask).await.error();
        assert_eq!((status, code.as_str()), (400, "invalid"), "{ask}");
        assert!(message.contains("missing field"), "{ask}: {message}");
    }
}

#[tokio::test]
async fn whose_fault_it_is_shows_in_the_status_and_503_is_the_node_s_alone() {
    let gateway = gateway().await;
    for (id, status, code) in [
        ("gone", 410, "gone"),
        ("cut", 409, "cut"),
        ("deaf", 502, "guest_failed"),
        ("full", 409, "command_refused"),
        ("bare", 501, "no_exec"),
        ("broken", 503, "not_done"),
    ] {
        let answer = gateway.ask(&format!("POST /v1/sandboxes/{id}/resume")).await;
        let (got, said, message) = answer.error();
        assert_eq!((got, said.as_str()), (status, code), "{id}: {message}");
        assert_eq!(answer.header("x-failed-component"), (id == "deaf").then_some("function"), "{id}");
        assert_eq!(answer.header("retry-after").is_some(), status == 503, "{id}");
        assert!(message.contains(id), "{message}");
    }
}

#[tokio::test]
async fn a_request_whose_sandbox_is_killed_under_it_is_told_so() {
    let answer = gateway().await.ask("GET /sandbox/killed/").await;
    let (status, code, message) = answer.error();
    assert_eq!((status, code.as_str()), (410, "gone"), "{message}");
    assert!(message.contains("was killed while the request was in it"), "{message}");
}

#[tokio::test]
async fn how_long_something_lasts_has_bounds_that_are_named() {
    let gateway = gateway().await;
    for (verb, body, field) in [
        ("timeout", r#"{"timeout":"1ns"}"#, "timeout"),
        ("timeout", r#"{"timeout":"0s"}"#, "timeout"),
        ("resume", r#"{"timeout":"366days"}"#, "timeout"),
        ("hold", r#"{"name":"ci","lasts":"999us"}"#, "lasts"),
    ] {
        let length = body.len();
        let head = format!("POST /v1/sandboxes/asleep/{verb} HTTP/1.1\r\nHost: h\r\nConnection: close");
        let answer = gateway.exchange(format!("{head}\r\nContent-Length: {length}\r\n\r\n{body}")).await;
        let (status, code, message) = answer.error();
        assert_eq!((status, code.as_str()), (400, "invalid"), "{body}");
        let bounds = message.starts_with(&format!("{field} is ")) && message.ends_with("must be 1ms to 365days");
        assert!(bounds, "{message}");
    }
}
