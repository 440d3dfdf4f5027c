//! `stasis pool` and `stasis sandbox`, each verb with and without `--json`, and used wrongly.

use serde_json::{Value, json};

use super::{
    Case, of_the_bare_guest,
    sandboxes::{command, show},
    templates,
};
use crate::{cli::Stasis, fixtures, server::Server, world::World};

pub(super) fn cases() -> Vec<Case> {
    vec![of_the_bare_guest(
        "every verb of `stasis pool` and `stasis sandbox` does what it says, for people and programs",
        verbs,
    )]
}

/// What a verb that succeeds prints.
fn said(stasis: &Stasis, words: &[&str]) -> String {
    let ran = stasis.run(words);
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{words:?}: {ran:?}");
    ran.stdout
}

/// The same with `--json`, which is one line.
fn told(stasis: &Stasis, words: &[&str]) -> Value {
    let text = said(stasis, &[words, &["--json"]].concat());
    assert_eq!(text.trim_end().lines().count(), 1, "{words:?}: {text}");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{words:?}: {error}: {text}"))
}

/// Why it was refused, for people and programs alike.
fn refused(stasis: &Stasis, words: &[&str], why: &str) {
    for words in [words.to_vec(), [words, &["--json"]].concat()] {
        let ran = stasis.run(&words);
        assert!(ran.code == 1 && ran.refusal().contains(why), "{words:?}: {ran:?}");
    }
}

fn verbs(world: &World) {
    let server = Server::start_bare(&world.place("verbs"), &[]);
    let stasis = server.stasis();
    templates::build(&server.api(), "/v1/templates", &fixtures::bare("verbs", ""));
    pools(&server, &stasis);
    sandboxes(&server, &stasis);
    misused(&stasis);
    assert_eq!(server.stop(), Vec::<String>::new());
}

fn pools(server: &Server, stasis: &Stasis) {
    let setting = |name: &str| server.api().get("/v1/pools/verbs").success()["settings"][name].clone();
    assert!(said(stasis, &["pool", "list"]).lines().nth(1).unwrap().starts_with("verbs "));
    assert_eq!(told(stasis, &["pool", "list"])["pools"][0]["template"], "verbs");
    let shown: Value = serde_json::from_str(&said(stasis, &["pool", "inspect", "verbs"])).unwrap();
    assert_eq!(shown["settings"], told(stasis, &["pool", "inspect", "verbs"])["settings"]);
    assert!(said(stasis, &["pool", "set", "verbs", "--max", "7"]).contains("verbs "));
    assert_eq!(setting("max"), 7);
    assert_eq!(told(stasis, &["pool", "set", "verbs", "--max", "6"])["settings"]["max"], 6);
    assert_eq!(setting("max"), 6);
    refused(stasis, &["pool", "set", "verbs", "--min", "9"], "pool.min is 9");
    for verb in ["inspect", "set"] {
        refused(stasis, &["pool", verb, "no-such"], "there is no template");
    }
}

fn sandboxes(server: &Server, stasis: &Stasis) {
    let api = server.api();
    let create = ["sandbox", "create", "verbs", "--idle", "0s", "--timeout", "1h"];
    let text = said(stasis, &create);
    let id = text.trim();
    let other = told(stasis, &create)["id"].as_str().unwrap().to_owned();
    let state = || show(&api, id)["state"].as_str().unwrap().to_owned();
    let of = |verb: &'static str, more: &[&'static str]| {
        let words = [&["sandbox", verb, id], more].concat();
        words.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let say = |verb, more: &[&'static str]| {
        let words = of(verb, more);
        said(stasis, &words.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let tell = |verb, more: &[&'static str]| {
        let words = of(verb, more);
        told(stasis, &words.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let list = said(stasis, &["sandbox", "list"]);
    assert!(list.contains(id) && list.contains(&other), "{list}");
    assert_eq!(told(stasis, &["sandbox", "list", "--state", "running"])["sandboxes"].as_array().unwrap().len(), 2);
    let inspected: Value = serde_json::from_str(&say("inspect", &[])).unwrap();
    assert_eq!((&inspected["id"], &tell("inspect", &[])["id"]), (&id.into(), &id.into()));

    assert_eq!(say("pause", &[]).trim_end().split(',').next().unwrap(), format!("{id} is suspended"));
    assert_eq!(state(), "suspended");
    refused(stasis, &["sandbox", "pause", id], "is suspended: it cannot be paused; possible now: pause to disk");
    assert_eq!(tell("pause", &["--to", "disk"])["state"], "hibernated");
    assert_eq!(state(), "hibernated");
    let words = said(stasis, &["sandbox", "logs", id]);
    assert!(words.contains("not known while it does not run"), "{words}");
    assert_eq!(tell("logs", &[]), json!({ "output": null, "console": null }));
    assert!(say("resume", &[]).starts_with(&format!("{id} is running")));
    assert_eq!(state(), "running");
    assert_eq!(tell("resume", &[])["state"], "running");
    command(&api, id, "pause", &json!({})).success();
    assert_eq!(say("connect", &[]), format!("{}/sandbox/{id}/\n", server.url()));
    assert_eq!(state(), "running");
    assert_eq!(tell("connect", &["--timeout", "2h"])["id"], id);

    let ends = |shown: &Value| shown["ends_at"].as_u64().unwrap();
    let before = ends(&show(&api, id));
    say("timeout", &["3h"]);
    assert!(ends(&show(&api, id)) > before);
    assert!(ends(&tell("timeout", &["1h"])) < before);
    say("hold", &["ci"]);
    assert_eq!(show(&api, id)["holds"], json!([{ "name": "ci", "until": null }]));
    assert_eq!(tell("hold", &["me", "--lasts", "1h"])["holds"].as_array().unwrap().len(), 2);
    say("hold", &["me", "--release"]);
    assert_eq!(tell("hold", &["ci", "--release"])["holds"], json!([]));
    refused(stasis, &["sandbox", "timeout", id, "1ns"], "must be 1ms to 365days");

    // This guest has no commands, and says so.
    for more in [[].as_slice(), &["--json"]] {
        let ran = stasis.run([&["sandbox", "exec", id], more, &["--", "ls"]].concat());
        assert!(ran.code == 1 && ran.refusal().contains("has no exec"), "{ran:?}");
    }
    assert_eq!(say("kill", &[]), format!("{id} is killed\n"));
    assert_eq!(told(stasis, &["sandbox", "kill", &other]), json!({ "killed": other }));
    assert_eq!(told(stasis, &["sandbox", "list"]), json!({ "sandboxes": [] }));
}

fn misused(stasis: &Stasis) {
    let none = "sb-00000000000000000000000000000000";
    let verbs: [&[&str]; 9] = [
        &["inspect"],
        &["connect"],
        &["pause"],
        &["resume"],
        &["kill"],
        &["timeout", "1h"],
        &["hold", "ci"],
        &["hold", "ci", "--release"],
        &["logs"],
    ];
    for verb in verbs {
        let words = [&["sandbox", verb[0], none], &verb[1..]].concat();
        refused(stasis, &words, "there is no sandbox");
    }
    let ran = stasis.run(["sandbox", "exec", none, "--", "ls"]);
    assert!(ran.code == 1 && ran.refusal().contains("there is no sandbox"), "{ran:?}");
    refused(stasis, &["sandbox", "create", "no-such"], "there is no template");
    // What the command line itself refuses is a 2.
    for words in [["sandbox", "list", "--state", "asleep"], ["sandbox", "pause", none, "--to=tape"]] {
        assert_eq!(stasis.run(words).code, 2, "{words:?}");
    }
}
