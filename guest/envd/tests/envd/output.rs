//! Much output, slow and dead clients, processes in the background.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::json;

use crate::rig::{Rig, shell};

/// 16 MiB, more than all buffers together.
const MUCH: &str = "head -c 16777216 /dev/zero";
/// 4 MiB, more than pipes hold.
const MORE: &str = "head -c 4194304 /dev/zero";

#[tokio::test]
async fn one_who_reads_gets_everything() {
    let rig = Rig::new().await;
    let mut stream = rig.run(&format!("{MORE}; {MORE} >&2; exit 7")).await;
    stream.pid().await;
    let said = stream.rest().await;
    assert_eq!((said.stdout.len(), said.stderr.len()), (4_194_304, 4_194_304));
    assert_eq!(said.end.unwrap()["exitCode"], 7);
}

#[tokio::test]
async fn a_dead_client_stops_neither_the_process_nor_the_other_client() {
    let rig = Rig::new().await;
    let mut stream = rig
        .stream(
            "process.Process/Start",
            &json!({"process": {"cmd": "/bin/sh", "args": ["-c", format!("read go; {MUCH}")]}}),
        )
        .await;
    let pid = stream.pid().await;
    // It connects, and never reads.
    let mut dead = rig.stream("process.Process/Connect", &json!({"process": {"pid": pid}})).await;
    assert_eq!(dead.pid().await, pid);
    rig.call("process.Process/SendInput", &json!({"process": {"pid": pid}, "input": {"stdin": STANDARD.encode("\n")}}))
        .await;
    let said = stream.rest().await;
    assert_eq!((said.stdout.len(), said.end.unwrap()["status"].as_str()), (16_777_216, Some("exit status 0")));
    // It is told that it has missed something.
    let missed = dead.rest().await;
    assert_eq!(missed.error.unwrap()["code"], "resource_exhausted");
    assert!(missed.stdout.len() < said.stdout.len());
}

#[tokio::test]
async fn nobody_needs_to_listen() {
    let rig = Rig::new().await;
    let mut stream = rig.run(&format!("{MORE}; echo done > done; exec sleep 1000")).await;
    let pid = stream.pid().await;
    drop(stream);
    let mut waits = rig.run("while ! test -s done; do :; done; cat done").await;
    waits.pid().await;
    assert_eq!(waits.rest().await.text(), "done\n");
    rig.call("process.Process/SendSignal", &json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})).await;
}

/// It is not waited for, and its later output neither kills nor blocks it.
#[tokio::test]
async fn what_is_left_in_the_background_goes_on() {
    let rig = Rig::new().await;
    let line = format!("mkfifo go; (read x < go; {MORE}; echo over > over) & echo begun");
    let mut start = shell(&line);
    start["stdin"] = json!(true);
    let mut stream = rig.stream("process.Process/Start", &start).await;
    stream.pid().await;
    let said = stream.rest().await;
    assert_eq!((said.text().as_str(), said.end.unwrap()["status"].as_str()), ("begun\n", Some("exit status 0")));
    let mut waits = rig.run("echo > go; while ! test -s over; do :; done; cat over").await;
    waits.pid().await;
    assert_eq!(waits.rest().await.text(), "over\n");
}
