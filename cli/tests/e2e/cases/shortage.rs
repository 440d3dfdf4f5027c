//! When memory or disk is short: sandboxes that are suspended make room, what cannot be done is refused and said, and nothing is lost.

use std::{path::Path, process::Command, time::Duration};

use serde_json::{Value, json};

use super::{
    Case, of_the_bare_guest,
    sandboxes::{command, create, kill, show},
    templates,
};
use crate::{
    cli::finish,
    fixtures,
    http::Api,
    server::Server,
    world::{World, eventually},
};

/// How long anything may take on a loaded machine.
const SOON: Duration = Duration::from_secs(60);
/// Sandboxes of 72 MiB with what belongs to one, of which [`MEMORY`] holds three at most.
const SANDBOXES: usize = 6;
const MEMORY: &str = "256MiB";

pub(super) fn cases() -> Vec<Case> {
    vec![
        of_the_bare_guest("a suspended sandbox gives its memory up to whoever needs it, and has it again", memory),
        of_the_bare_guest("a full disk is said, costs no sandbox, and is forgotten when there is room", disk),
    ]
}

fn server(world: &World, name: &str, more: &[&str]) -> Server {
    let server = Server::start_bare(&world.place(name), more);
    templates::build(&server.api(), "/v1/templates", &fixtures::bare("short", "max = 8\n"));
    server
}

/// Keeps a text in a sandbox's memory.
fn keep(api: &Api, id: &str, text: &str) {
    let kept = api.call("PUT", &format!("/sandbox/{id}/memory"), &[], text.as_bytes());
    assert_eq!((kept.status(), kept.text().as_str()), (200, "kept\n"), "{id}");
}

fn memory(world: &World) {
    let server = server(world, "memory", &["--memory", MEMORY]);
    let api = server.api();
    let new = json!({ "template": "short", "timeout": "1h", "idle": "0s", "hibernate_after": "0s" }).to_string();
    // One that waits for longer than the node lets it is told to come again.
    let made = |_| {
        eventually("there is room for one more", SOON, || {
            let made = api.post("/v1/sandboxes", new.as_bytes());
            assert!([201, 429].contains(&made.status()), "{}", made.text());
            (made.status() == 201).then(|| made.json()["id"].as_str().unwrap().to_owned())
        })
    };
    let mut ids = Vec::new();
    for number in 0..SANDBOXES {
        let id = made(number);
        keep(&api, &id, &format!("token {number}"));
        command(&api, &id, "pause", &json!({})).success();
        ids.push(id);
    }
    let states: Vec<_> = ids.iter().map(|id| show(&api, id)["state"].as_str().unwrap().to_owned()).collect();
    let on_disk = states.iter().filter(|state| *state == "hibernated").count();
    assert!(on_disk >= SANDBOXES - 3, "nobody has asked for it, but there is no room: {states:?}");
    for (number, id) in ids.iter().enumerate() {
        let answer = eventually("there is room for it", SOON, || {
            let answer = api.get(&format!("/sandbox/{id}/memory"));
            assert!([200, 429].contains(&answer.status()), "{}", answer.text());
            (answer.status() == 200).then_some(answer)
        });
        assert_eq!((answer.text(), answer.header("x-stasis-start")), (format!("token {number}"), "resumed"));
        command(&api, id, "pause", &json!({})).success();
    }
    ids.iter().for_each(|id| kill(&api, id));

    // And without a shortage, when its time has come.
    let id = create(&api, &json!({ "template": "short", "hibernate_after": "50ms" }));
    keep(&api, &id, "late");
    command(&api, &id, "pause", &json!({})).success();
    eventually("it goes to disk", SOON, || (show(&api, &id)["state"] == "hibernated").then_some(()));
    assert_eq!(api.get(&format!("/sandbox/{id}/memory")).text(), "late");
    kill(&api, &id);
    assert_eq!(server.stop(), Vec::<String>::new());
}

/// Takes all that is left of a file system.
fn fill(folder: &Path) {
    std::fs::create_dir(folder).unwrap();
    let mut number = 0;
    for size in (12..=30).rev().map(|power| 1_u64 << power) {
        loop {
            number += 1;
            let file = folder.join(number.to_string());
            let taken = finish(Command::new("fallocate").arg("--length").arg(size.to_string()).arg(&file));
            if taken.code != 0 {
                let _ = std::fs::remove_file(&file);
                break;
            }
        }
    }
}

fn disk(world: &World) {
    let server = server(world, "full", &["--disk", "1GiB"]);
    let api = server.api();
    let [running, suspended] = ["running", "suspended"].map(|text| {
        let id = create(&api, &json!({ "template": "short" }));
        keep(&api, &id, text);
        id
    });
    command(&api, &suspended, "pause", &json!({})).success();
    let filler = server.files().join("filler");
    fill(&filler);
    for (id, was) in [(&running, ["running", "suspended"]), (&suspended, ["suspended"; 2])] {
        let refused = command(&api, id, "pause", &json!({ "to": "disk" }));
        assert_eq!(refused.status(), 503, "{}", refused.text());
        let error = &refused.json()["error"];
        assert!(error["code"] == "not_done" || error["code"] == "store_unavailable", "{error}");
        println!("on a full disk: {}", error["message"]);
        refused.header("retry-after");
        let state = show(&api, id)["state"].clone();
        assert!(was.iter().any(|was| state == **was), "it is as it was: {state}");
    }
    std::fs::remove_dir_all(&filler).unwrap();
    for (id, text) in [(&running, "running"), (&suspended, "suspended")] {
        let answer = eventually("it answers", SOON, || {
            let answer = api.get(&format!("/sandbox/{id}/memory"));
            (answer.status() == 200).then_some(answer)
        });
        assert_eq!(answer.text(), text);
        let paused: Value = eventually("it goes to disk", SOON, || {
            let answer = command(&api, id, "pause", &json!({ "to": "disk" }));
            (answer.status() == 200).then(|| answer.json())
        });
        assert_eq!(paused["state"], "hibernated", "{paused}");
        assert_eq!(api.get(&format!("/sandbox/{id}/memory")).text(), text);
        kill(&api, id);
    }
    assert_eq!(server.stop(), Vec::<String>::new());
}
