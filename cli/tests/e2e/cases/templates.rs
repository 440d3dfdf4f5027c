//! Building and removing, over HTTP.

use serde_json::Value;

use super::{Case, over_http};
use crate::{fixtures, http::Api, world::World};

pub(super) fn cases() -> Vec<Case> {
    vec![
        over_http("a template.toml that is wrong is refused with what to change", wrong_spec),
        over_http("what is no archive of a folder is refused", no_archive),
    ]
}

/// Builds a template, and returns what the last event says of it.
pub(super) fn build(api: &Api, target: &str, archive: &[u8]) -> Value {
    let answer = api.call("POST", target, &[("Content-Type", "application/x-tar")], archive);
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let text = answer.text();
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(last["event"], "built", "{text}");
    last["template"].clone()
}

/// Removes a template; then it must be gone.
pub(super) fn remove(world: &World, name: &str) {
    let remove = || world.api.call("DELETE", &format!("/v1/templates/{name}"), &[], b"").status();
    assert_eq!(remove(), 204);
    assert_eq!(world.api.get(&format!("/v1/templates/{name}")).status(), 404);
    assert_eq!(world.api.get(&format!("/invoke/{name}/")).status(), 404);
    assert_eq!(remove(), 404);
    if let Some(server) = &world.server {
        assert!(!server.files().join("templates").join(name).exists(), "its files are still there");
    }
}

fn refusal(world: &World, archive: &[u8]) -> Value {
    let answer = world.api.call("POST", "/v1/templates", &[("Content-Type", "application/x-tar")], archive);
    assert_eq!(answer.status(), 400, "{}", answer.text());
    assert_eq!(answer.json()["error"]["code"], "invalid");
    answer.json()["error"]["message"].clone()
}

fn wrong_spec(world: &World) {
    for (spec, hint) in [
        ("name = ", "template.toml is not valid"),
        ("name = 'x'", "missing field `command`"),
        ("name = 'x'\ncommand = 'y'\ncolour = 'red'", "unknown field `colour`"),
        ("name = '../x'\ncommand = 'y'", "lower-case letters"),
        ("name = 'x'\ncommand = 'y'\nmemory = '99GiB'", "memory is 99.0 GiB, but must be 64MiB to 3GiB"),
        ("name = 'x'\ncommand = 'y'\nbase = 'plan9'", "there is no base \"plan9\""),
    ] {
        let message = refusal(world, &fixtures::archive(&[("template.toml", spec.as_bytes())]));
        assert!(message.as_str().unwrap().contains(hint), "{spec:?} is refused with {message}");
    }
}

fn no_archive(world: &World) {
    let whole = fixtures::identity_as("x");
    for bytes in [b"hello".as_slice(), &whole[..whole.len() / 2], &fixtures::archive(&[("main.py", b"1")])] {
        refusal(world, bytes);
    }
    let unlabelled = world.api.post("/v1/templates", &whole);
    assert_eq!(unlabelled.status(), 415, "{}", unlabelled.text());
}
