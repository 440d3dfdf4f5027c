//! Commands in sandboxes, and what the node can afford.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Case, on_the_host};
use crate::{
    cli::Finished,
    world::{World, eventually},
};

const SOON: Duration = Duration::from_secs(60);

pub(super) fn cases() -> Vec<Case> {
    vec![on_the_host(
        "a command in a sandbox is its user's, is told whole, and is killed when its caller leaves",
        commands,
    )]
}

fn commands(world: &World) {
    let sandbox = |words: &[&str]| world.stasis.run([&["sandbox"], words].concat());
    let made = sandbox(&["create", "identity", "--idle", "0s", "--timeout", "1h"]);
    assert_eq!(made.code, 0, "{made:?}");
    let id = made.stdout.trim();
    let exec = |line: &str| sandbox(&["exec", id, "--env", "WORD=hello", "--", "sh", "-c", line]);

    let ran = exec("id -un; pwd; echo $WORD; echo trouble >&2; exit 7");
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (7, "user\n/app\nhello\n", "trouble\n"));
    let ran = sandbox(&["exec", id, "--", "no-such-program"]);
    assert_eq!(ran.code, 127, "{ran:?}");
    let ran = sandbox(&["exec", id, "--json", "--", "sh", "-c", "echo out; exit 3"]);
    let events: Vec<Value> = ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let wanted = [json!({ "event": "stdout", "text": "out\n" }), json!({ "event": "exited", "status": 3 })];
    assert_eq!((ran.code, events.as_slice()), (3, wanted.as_slice()));

    // One whose caller leaves: the connection ends while it runs.
    let body = json!({ "command": ["sh", "-c", "echo begun; exec sleep 54321"] }).to_string();
    let length = body.len().to_string();
    let mut left =
        world.api.begin("POST", &format!("/v1/sandboxes/{id}/exec"), &[("Content-Length", &length)]).unwrap();
    left.send(body.as_bytes()).unwrap();
    assert_eq!(left.head().unwrap().status, 200);
    assert_eq!(left.chunk().unwrap().unwrap(), b"{\"event\":\"stdout\",\"text\":\"begun\\n\"}\n");
    let runs = || {
        let Finished { stdout, .. } = exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '");
        stdout.contains("sleep 54321")
    };
    assert!(runs(), "it does not run");
    let info = world.api.get(&format!("/v1/sandboxes/{id}")).success();
    assert_eq!((&info["requests"], &info["commands"]), (&0.into(), &1.into()), "it keeps the sandbox awake: {info}");
    drop(left);
    eventually("the end of a command whose caller left", SOON, || (!runs()).then_some(()));

    // On disk, it is resumed for one; logs do not do that.
    assert_eq!(sandbox(&["pause", id, "--to", "disk"]).code, 0);
    let logs: Value = serde_json::from_str(&sandbox(&["logs", id, "--json"]).stdout).unwrap();
    assert_eq!(logs, json!({ "output": null, "console": null }));
    assert_eq!(exec("echo awake").stdout, "awake\n");
    let logs: Value = serde_json::from_str(&sandbox(&["logs", id, "--json"]).stdout).unwrap();
    assert!(logs["output"].is_string() && logs["console"].is_string(), "{logs}");

    let capacity = world.api.get("/v1/capacity").success();
    let memory = |name: &str| capacity["memory"][name].as_u64().unwrap();
    let sum = memory("free") + memory("committed") + memory("expected_dirty") + memory("shared");
    assert_eq!(sum, memory("limit"), "{capacity}");
    assert!(memory("shared") > 0 && capacity["vcpus"]["committed"].as_u64().unwrap() >= 1, "{capacity}");
    assert_eq!(sandbox(&["kill", id]).code, 0);
}
