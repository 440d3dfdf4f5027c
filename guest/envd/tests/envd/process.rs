//! Starting, connecting, input, signals.

use std::fs;

use base64::{Engine, engine::general_purpose::STANDARD};
use hyper::StatusCode;
use serde_json::json;

use crate::rig::{Rig, frame, request, shell};

const OK: StatusCode = StatusCode::OK;

#[tokio::test]
async fn a_command_says_what_it_writes_and_how_it_ends() {
    let rig = Rig::new().await;
    for (line, end) in [
        ("echo out; echo err >&2", json!({"exited": true, "status": "exit status 0"})),
        (
            "echo out; echo err >&2; exit 3",
            json!({"exitCode": 3, "exited": true, "status": "exit status 3", "error": "exit status 3"}),
        ),
        (
            "echo out; echo err >&2; kill -9 $$",
            json!({"exitCode": -1, "status": "signal: killed", "error": "signal: killed"}),
        ),
    ] {
        let mut stream = rig.run(line).await;
        assert!(stream.pid().await > 1);
        let said = stream.rest().await;
        assert_eq!((&said.stdout[..], &said.stderr[..]), (&b"out\n"[..], &b"err\n"[..]), "{line}");
        assert_eq!((said.end, said.error), (Some(end), None), "{line}");
    }
}

#[tokio::test]
async fn a_process_has_its_users_environment_and_ids() {
    let rig = Rig::new().await;
    let line = "echo $HOME $USER $LOGNAME $E2B_SANDBOX $PWD $A; id -u; id -G; test -n \"$PATH\" && echo path";
    let mut start = shell(line);
    start["process"]["args"] = json!(["-c", line]);
    start["process"]["envs"] = json!({"A": "1"});
    let mut stream = rig.stream("process.Process/Start", &start).await;
    stream.pid().await;
    let text = stream.rest().await.text();
    let lines: Vec<&str> = text.lines().collect();
    let home = rig.path("").display().to_string();
    let home = home.trim_end_matches('/');
    assert_eq!(lines[0], format!("{home} user user true {home} 1"));
    assert_eq!(lines[1], rig.uid.to_string());
    if rig.uid == 1000 {
        assert_eq!(lines[2], "1000 4242");
    }
    assert_eq!(lines[3], "path");
}

#[tokio::test]
async fn a_request_names_its_user_by_basic_authorization() {
    let rig = Rig::new().await;
    let mut stream =
        rig.stream_as("process.Process/Start", &shell("echo $HOME"), &[("authorization", "Basic eDo=")]).await;
    let said = stream.rest().await;
    assert_eq!(said.error.unwrap(), json!({"code": "unauthenticated", "message": "invalid username: 'x'"}));
    if rig.uid == 1000 {
        let mut stream = rig
            .stream_as("process.Process/Start", &shell("echo $HOME; id -u"), &[("authorization", "Basic cm9vdDo=")])
            .await;
        stream.pid().await;
        assert_eq!(stream.rest().await.text(), "/root\n0\n");
    }
}

#[tokio::test]
async fn a_process_starts_where_it_was_asked_to() {
    let rig = Rig::new().await;
    fs::create_dir(rig.path("sub")).unwrap();
    for (cwd, wanted) in [("sub", rig.path("sub")), ("~/sub", rig.path("sub")), ("/usr/../tmp", "/tmp".into())] {
        let start = json!({"process": {"cmd": "/bin/pwd", "args": ["-P"], "cwd": cwd}});
        let mut stream = rig.stream("process.Process/Start", &start).await;
        stream.pid().await;
        assert_eq!(stream.rest().await.text(), format!("{}\n", wanted.canonicalize().unwrap().display()), "{cwd}");
    }
}

#[tokio::test]
async fn a_process_is_listed_and_found_by_id_and_tag_until_it_ends() {
    let rig = Rig::new().await;
    let start = json!({"process": {"cmd": "cat", "args": [], "envs": {"A": "1"}, "cwd": "/tmp"}, "tag": "mine"});
    let mut stream = rig.stream("process.Process/Start", &start).await;
    let pid = stream.pid().await;
    let listed = json!({"processes": [{"config": {"cmd": "cat", "args": [], "envs": {"A": "1"}, "cwd": "/tmp"}, "pid": pid, "tag": "mine"}]});
    assert_eq!(rig.call("process.Process/List", &json!({})).await, (OK, listed));
    let mut second = rig.stream("process.Process/Connect", &json!({"process": {"tag": "mine"}})).await;
    assert_eq!(second.pid().await, pid);

    let input = json!({"process": {"pid": pid}, "input": {"stdin": STANDARD.encode("hello\n")}});
    assert_eq!(rig.call("process.Process/SendInput", &input).await, (OK, json!({})));
    stream.until("hello\n").await;
    second.until("hello\n").await;
    assert_eq!(rig.call("process.Process/CloseStdin", &json!({"process": {"tag": "mine"}})).await, (OK, json!({})));
    for stream in [&mut stream, &mut second] {
        assert_eq!(stream.rest().await.end.unwrap()["status"], "exit status 0");
    }

    assert_eq!(rig.call("process.Process/List", &json!({})).await, (OK, json!({"processes": []})));
    // Who comes late hears the end.
    let mut late = rig.stream("process.Process/Connect", &json!({"process": {"pid": pid}})).await;
    assert_eq!(late.pid().await, pid);
    assert_eq!(late.rest().await.end.unwrap()["status"], "exit status 0");
    let gone = json!({"code": "not_found", "message": format!("process with pid {pid} not found")});
    let signal = json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"});
    assert_eq!(rig.call("process.Process/SendSignal", &signal).await, (StatusCode::NOT_FOUND, gone));
}

#[tokio::test]
async fn input_may_come_as_a_stream() {
    let rig = Rig::new().await;
    let mut stream = rig.stream("process.Process/Start", &json!({"process": {"cmd": "cat"}})).await;
    let pid = stream.pid().await;
    let frames = [
        frame(&json!({"start": {"process": {"pid": pid}}})),
        frame(&json!({"data": {"input": {"stdin": STANDARD.encode("one ")}}})),
        frame(&json!({"keepalive": {}})),
        frame(&json!({"data": {"input": {"stdin": STANDARD.encode("two\n")}}})),
    ];
    let (status, body) =
        rig.answer(request("process.Process/StreamInput", "application/connect+json", &[], frames.concat())).await;
    assert_eq!((status, &body[..]), (OK, &b"\0\0\0\0\x02{}\x02\0\0\0\x02{}"[..]));
    stream.until("one two\n").await;
    rig.call("process.Process/SendSignal", &json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGTERM"})).await;
    assert_eq!(stream.rest().await.end.unwrap()["status"], "signal: terminated");
}

/// A job that a shell put into a group of its own, too.
#[tokio::test]
async fn a_signal_ends_all_that_the_process_started() {
    let rig = Rig::new().await;
    let mut stream =
        rig.run("set -m; sleep 1000 & echo $!; bash -c 'sleep 1000 & echo $!; wait' & echo last; wait").await;
    let pid = stream.pid().await;
    let mut said = stream.until("last\n").await.text();
    while said.lines().count() < 3 || !said.ends_with('\n') {
        said += &stream.until("\n").await.text();
    }
    let children: Vec<u32> = said.lines().filter_map(|line| line.parse().ok()).collect();
    assert_eq!(children.len(), 2, "{said}");
    assert!(children.iter().all(|child| runs(*child)));
    rig.call("process.Process/SendSignal", &json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})).await;
    assert_eq!(stream.rest().await.end.unwrap()["status"], "signal: killed");
    crate::rig::within("the children's end", async {
        while children.iter().any(|child| runs(*child)) {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

fn runs(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[tokio::test]
async fn a_process_outlives_its_client() {
    let rig = Rig::new().await;
    let mut stream = rig.run("mkfifo pipe; read line < pipe; echo $line").await;
    let pid = stream.pid().await;
    drop(stream);
    let mut stream = rig.stream("process.Process/Connect", &json!({"process": {"pid": pid}})).await;
    assert_eq!(stream.pid().await, pid);
    rig.run("while ! test -p pipe; do :; done; echo hello > pipe").await.rest().await;
    let said = stream.rest().await;
    assert_eq!((said.text().as_str(), said.end.unwrap()["status"].as_str()), ("hello\n", Some("exit status 0")));
}

/// The stream ends, the process does not.
#[tokio::test]
async fn a_deadline_is_the_calls_not_the_processs() {
    let rig = Rig::new().await;
    let mut stream = rig
        .stream_as("process.Process/Start", &shell("echo begun; exec sleep 1000"), &[("connect-timeout-ms", "1")])
        .await;
    let pid = stream.pid().await;
    assert_eq!(stream.rest().await.error.unwrap()["code"], "deadline_exceeded");
    let (_, listed) = rig.call("process.Process/List", &json!({})).await;
    assert_eq!(listed["processes"][0]["pid"], pid);
    rig.call("process.Process/SendSignal", &json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})).await;
}

#[tokio::test]
async fn a_silent_stream_is_kept_alive() {
    let rig = Rig::new().await;
    let mut stream = rig
        .stream_as("process.Process/Start", &json!({"process": {"cmd": "cat"}}), &[("keepalive-ping-interval", "1")])
        .await;
    let pid = stream.pid().await;
    assert_eq!(stream.event().await, json!({"keepalive": {}}));
    assert_eq!(stream.event().await, json!({"keepalive": {}}));
    rig.call("process.Process/CloseStdin", &json!({"process": {"pid": pid}})).await;
    stream.rest().await;
}
