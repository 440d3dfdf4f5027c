//! Sandboxes: what is in one stays, through every way of pausing and resuming it.

use std::{thread, time::Duration};

use serde_json::{Value, json};

use super::{Case, on_the_host};
use crate::{
    http::{Answer, Api},
    world::{World, eventually},
};

/// How long a transition may take on a loaded machine.
const SOON: Duration = Duration::from_secs(60);

pub(super) fn cases() -> Vec<Case> {
    vec![
        on_the_host("a sandbox keeps memory, process and disk through pauses to RAM and to disk", cycles),
        on_the_host("children of a running sandbox go on from one moment, each as somebody else", forked),
        on_the_host("many requests to a paused sandbox resume it once, and all are answered", together),
        on_the_host(
            "a sandbox's clock stands still while it is paused, and its deadline does what was asked",
            deadline,
        ),
        on_the_host("a wrong command on a sandbox is refused, and says what is possible", refused),
        on_the_host("killing a sandbox leaves nothing of it, whatever it did", killed),
    ]
}

/// One that nothing pauses or ends while a case runs.
pub(super) fn create(api: &Api, more: &Value) -> String {
    let mut new = json!({ "template": "identity", "timeout": "1h", "idle": "0s", "hibernate_after": "0s" });
    new.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let made = api.post("/v1/sandboxes", new.to_string().as_bytes());
    assert_eq!(made.status(), 201, "{}", made.text());
    let info = made.json();
    assert_eq!(info["state"], "running", "{info}");
    // Its VM may have had lives before, in the pool.
    assert!(info["certificate"]["generation"].as_u64() >= Some(1), "{info}");
    info["id"].as_str().unwrap().to_owned()
}

pub(super) fn show(api: &Api, id: &str) -> Value {
    api.get(&format!("/v1/sandboxes/{id}")).success()
}

/// As soon as a server has taken it over.
pub(super) fn taken_over(api: &Api, id: &str) -> Value {
    eventually("its VM answers its new server", SOON, || {
        let info = show(api, id);
        (info["pid"].is_null() || !info["certificate"].is_null()).then_some(info)
    })
}

pub(super) fn command(api: &Api, id: &str, verb: &str, body: &Value) -> Answer {
    api.post(&format!("/v1/sandboxes/{id}/{verb}"), body.to_string().as_bytes())
}

pub(super) fn kill(api: &Api, id: &str) {
    let killed = api.call("DELETE", &format!("/v1/sandboxes/{id}"), &[], b"");
    assert_eq!(killed.status(), 204, "{}", killed.text());
}

pub(super) fn identity(api: &Api, id: &str) -> (Value, String) {
    let answer = api.get(&format!("/sandbox/{id}/"));
    (answer.success(), answer.header("x-stasis-start").to_owned())
}

/// Its number among the function's calls is what RAM holds; what `remember` left is in RAM, on disk and in a process.
fn cycles(world: &World) {
    let api = &world.api;
    let id = create(api, &json!({ "metadata": { "case": "cycles" } }));
    let (first, start) = identity(api, &id);
    assert_eq!(start, "running");
    let left = api.get(&format!("/sandbox/{id}/remember/nonce-1")).success();
    assert_eq!(left["before"], json!([]));
    let mut generation = 1;
    for (to, state, by) in [
        ("ram", "suspended", "request"),
        ("disk", "hibernated", "request"),
        ("disk", "hibernated", "hand"),
        ("ram", "suspended", "hand"),
    ] {
        let paused = command(api, &id, "pause", &json!({ "to": to })).success();
        assert_eq!((&paused["state"], paused["pid"].is_null()), (&state.into(), state == "hibernated"), "{paused}");
        if by == "hand" {
            let resumed = command(api, &id, "resume", &json!({}));
            assert_eq!((resumed.status(), &resumed.json()["state"]), (201, &"running".into()), "{}", resumed.text());
            assert_eq!(command(api, &id, "connect", &json!({})).status(), 200, "it runs already");
        }
        generation += 1;
        let (now, start) = identity(api, &id);
        assert_eq!(start, if by == "hand" { "running" } else { "resumed" });
        assert_eq!(now["counter"].as_u64(), first["counter"].as_u64().map(|first| first + generation - 1));
        for same in ["value", "hostname", "machine_id", "boot_nonce", "pid"] {
            assert_eq!(now[same], first[same], "{same} after {state}");
        }
        assert_ne!(now["random"], first["random"]);
        let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        assert!((now["time"].as_f64().unwrap() - wall).abs() < 30.0, "{now}: it is {wall}");
        assert_eq!(show(api, &id)["certificate"]["generation"], generation);
    }
    let left = api.get(&format!("/sandbox/{id}/remember/nonce-2")).success();
    // Memory, three files and a process.
    let before = left["before"].as_array().unwrap();
    assert_eq!(before.len(), 5, "{left}");
    assert!(before.iter().any(|trace| trace.as_str().unwrap().starts_with("process")), "{left}");
    assert_eq!(show(api, &id)["metadata"], json!({ "case": "cycles" }));
    kill(api, &id);
}

/// What was in the parent is in each child; what they do later is their own.
fn forked(world: &World) {
    let api = &world.api;
    let id = create(api, &json!({}));
    let (parent, _) = identity(api, &id);
    api.get(&format!("/sandbox/{id}/remember/parents")).success();
    let fork = |of: &str, count| {
        let made = command(api, of, "fork", &json!({ "count": count }));
        assert_eq!(made.status(), 201, "{}", made.text());
        let infos = made.json()["sandboxes"].as_array().unwrap().clone();
        infos.iter().map(|info| info["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let children = fork(&id, 2);
    let grandchildren = fork(&children[0], 1);
    let all: Vec<_> = children.iter().chain(&grandchildren).collect();
    let mut seen = vec![parent.clone()];
    for child in &all {
        // Also one that was on disk meanwhile.
        command(api, child, "pause", &json!({ "to": "disk" })).success();
        let (now, _) = identity(api, child);
        assert_eq!((&now["value"], &now["counter"]), (&parent["value"], &2.into()), "it goes on where the parent was");
        for own in ["hostname", "machine_id", "boot_nonce", "random", "uuid4"] {
            assert!(seen.iter().all(|other| other[own] != now[own]), "{own} is another's: {now}");
        }
        seen.push(now);
        let left = api.get(&format!("/sandbox/{child}/remember/childs")).success();
        assert_eq!(left["before"].as_array().unwrap().len(), 5, "memory, three files and a process: {left}");
    }
    let left = api.get(&format!("/sandbox/{id}/remember/more")).success();
    assert!(!left.to_string().contains("childs"), "{left}");
    assert_eq!(identity(api, &id).0["counter"], 2);
    command(api, &id, "pause", &json!({})).success();
    assert_eq!(command(api, &id, "fork", &json!({})).status(), 409, "only one that runs");
    all.into_iter().chain([&id]).for_each(|id| kill(api, id));
}

/// How many ask at once: each is a thread more in a guest whose kernel is interpreted. Many
/// more are tried with fakes (`pool/src/session/tests.rs`).
const AT_ONCE: u64 = 4;

fn together(world: &World) {
    let api = &world.api;
    let id = create(api, &json!({}));
    for (round, to) in ["ram", "disk"].into_iter().enumerate() {
        command(api, &id, "pause", &json!({ "to": to })).success();
        let target = format!("/sandbox/{id}/");
        let answers: Vec<_> = thread::scope(|scope| {
            let asking: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(|| api.get(&target))).collect();
            asking.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let mut counters: Vec<_> = answers.iter().map(|answer| answer.success()["counter"].as_u64().unwrap()).collect();
        counters.sort_unstable();
        let first = 1 + AT_ONCE * round as u64;
        assert_eq!(counters, (first..first + AT_ONCE).collect::<Vec<_>>(), "each once, after {to}");
        assert_eq!(show(api, &id)["certificate"]["generation"], 2 + round as u64, "one resume from {to}");
    }
    kill(api, &id);
}

fn deadline(world: &World) {
    let api = &world.api;
    let id = create(api, &json!({ "timeout": "1h", "on_timeout": "pause" }));
    identity(api, &id);
    let shown = show(api, &id);
    assert_eq!((&shown["next"]["what"], &shown["next"]["at"]), (&"pause".into(), &shown["ends_at"]), "{shown}");
    let paused = command(api, &id, "pause", &json!({})).success();
    assert!(paused["ends_at"].is_null() && paused["time_left_ms"].as_u64().unwrap() <= 3_600_000, "{paused}");
    let later = show(api, &id);
    assert_eq!(later["time_left_ms"], paused["time_left_ms"], "its clock stands still");
    // A new timeout, which then runs out.
    let resumed = command(api, &id, "resume", &json!({ "timeout": "2s" }));
    assert_eq!(resumed.status(), 201, "{}", resumed.text());
    let over = || (show(api, &id)["state"] == "suspended").then_some(());
    eventually("a deadline pauses", SOON, over);
    let (again, start) = identity(api, &id);
    assert_eq!((&again["counter"], start.as_str()), (&2.into(), "resumed"));
    kill(api, &id);

    // Idle, unless held.
    let id = create(api, &json!({ "idle": "1s" }));
    command(api, &id, "hold", &json!({ "name": "ci" })).success();
    let held = show(api, &id);
    assert_eq!(held["idle"]["held_by"], json!([{ "hold": { "name": "ci", "until": null } }]), "{held}");
    assert!(held["idle"]["will_pause_at"].is_null() && held["idle"]["idle_since"].is_u64(), "{held}");
    let released = api.call("DELETE", &format!("/v1/sandboxes/{id}/hold/ci"), &[], b"");
    assert_eq!(released.success()["holds"], json!([]));
    eventually("an idle one is paused", SOON, || (show(api, &id)["state"] == "suspended").then_some(()));
    kill(api, &id);

    let id = create(api, &json!({ "timeout": "1s" }));
    let gone = || (api.get(&format!("/v1/sandboxes/{id}")).status() == 404).then_some(());
    eventually("a deadline kills", SOON, gone);
}

fn refused(world: &World) {
    let api = &world.api;
    let id = create(api, &json!({ "auto_resume": false }));
    command(api, &id, "pause", &json!({})).success();
    for answer in [command(api, &id, "pause", &json!({})), api.get(&format!("/sandbox/{id}/"))] {
        assert_eq!(answer.status(), 409, "{}", answer.text());
        let error = &answer.json()["error"];
        assert_eq!((&error["code"], &error["state"]), (&"wrong_state".into(), &"suspended".into()));
        assert!(
            error["message"].as_str().unwrap().contains("pause to disk, resume, timeout, hold, release, logs, kill"),
            "{error}"
        );
    }
    for (verb, body) in [
        ("pause", json!({ "to": "tape" })),
        ("timeout", json!({ "timeout": "soon" })),
        ("timeout", json!({ "timeout": "0s" })),
        ("hold", json!({ "name": "../x" })),
        ("resume", json!({ "time": "1s" })),
    ] {
        assert_eq!(command(api, &id, verb, &body).status(), 400, "{verb} {body}");
    }
    kill(api, &id);
    let again = api.call("DELETE", &format!("/v1/sandboxes/{id}"), &[], b"");
    assert_eq!((again.status(), &again.json()["error"]["code"]), (404, &"unknown_sandbox".into()));
    let unknown = api.post("/v1/sandboxes", br#"{"template":"no-such"}"#);
    assert_eq!((unknown.status(), &unknown.json()["error"]["code"]), (404, &"unknown_template".into()));
}

fn killed(world: &World) {
    let Some(server) = &world.server else { return };
    let api = &world.api;
    for to in ["", "ram", "disk"] {
        let id = create(api, &json!({}));
        let pid = show(api, &id)["pid"].as_u64().unwrap();
        let files = server.files().join("sandboxes").join(&id);
        if !to.is_empty() {
            command(api, &id, "pause", &json!({ "to": to })).success();
        }
        assert_eq!(files.exists(), to == "disk");
        kill(api, &id);
        assert!(!files.exists(), "{}", files.display());
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "its process lives");
        assert_eq!(api.get(&format!("/v1/sandboxes/{id}")).status(), 404);
    }
}
