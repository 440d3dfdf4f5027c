//! Terminals.

use base64::{Engine, engine::general_purpose::STANDARD};
use hyper::StatusCode;
use serde_json::{Value, json};

use crate::rig::{Rig, Stream};

async fn typed(rig: &Rig, pid: u64, text: &str) {
    let input = json!({"process": {"pid": pid}, "input": {"pty": STANDARD.encode(text)}});
    assert_eq!(rig.call("process.Process/SendInput", &input).await, (StatusCode::OK, json!({})));
}

async fn shell(rig: &Rig, args: Value) -> (Stream, u64) {
    let start = json!({"process": {"cmd": "/bin/bash", "args": args, "envs": {"TERM": "xterm", "PS1": "> "}}, "pty": {"size": {"cols": 81, "rows": 25}}});
    let mut stream = rig.stream("process.Process/Start", &start).await;
    let pid = stream.pid().await;
    (stream, pid)
}

#[tokio::test]
async fn a_shell_on_a_terminal_takes_input_and_sizes() {
    let rig = Rig::new().await;
    let (mut stream, pid) = shell(&rig, json!(["--norc", "-i"])).await;
    stream.until("> ").await;
    typed(&rig, pid, "stty size\n").await;
    stream.until("25 81\r\n").await;
    let update = json!({"process": {"pid": pid}, "pty": {"size": {"cols": 100, "rows": 30}}});
    assert_eq!(rig.call("process.Process/Update", &update).await, (StatusCode::OK, json!({})));
    typed(&rig, pid, "stty size; tty\n").await;
    stream.until("30 100\r\n/dev/pts/").await;
    // Interrupted by the terminal, so it is the controlling one.
    typed(&rig, pid, "sh -c 'echo begun; exec sleep 1000'\n").await;
    stream.until("begun\r\n").await;
    typed(&rig, pid, "\u{3}").await;
    stream.until("> ").await;
    typed(&rig, pid, "exit 5\n").await;
    let said = stream.rest().await;
    assert_eq!(said.end.unwrap()["exitCode"], 5);
}

#[tokio::test]
async fn all_that_was_written_comes_before_the_end() {
    let rig = Rig::new().await;
    for _ in 0..20 {
        let (mut stream, _) = shell(&rig, json!(["-c", "seq 1 2000; sleep 1000 & exit 3"])).await;
        let said = stream.rest().await;
        assert!(said.pty.ends_with(b"1999\r\n2000\r\n"), "{:?}", String::from_utf8_lossy(&said.pty));
        assert_eq!(said.end.unwrap()["exitCode"], 3);
    }
}

#[tokio::test]
async fn what_is_for_pipes_is_refused() {
    let rig = Rig::new().await;
    let (mut stream, pid) = shell(&rig, json!(["-c", "read line"])).await;
    let refused = |message: &str| (StatusCode::BAD_REQUEST, json!({"code": "failed_precondition", "message": message}));
    let stdin = json!({"process": {"pid": pid}, "input": {"stdin": "YQ=="}});
    let message = "tty assigned to process — input should be written to the pty, not the stdin";
    assert_eq!(rig.call("process.Process/SendInput", &stdin).await, refused(message));
    let message = "cannot close stdin for PTY process — send Ctrl+D (0x04) instead";
    assert_eq!(rig.call("process.Process/CloseStdin", &json!({"process": {"pid": pid}})).await, refused(message));
    typed(&rig, pid, "\n").await;
    assert_eq!(stream.rest().await.end.unwrap()["status"], "exit status 0");
}
