//! Callers that ask for what is not there, send too much, or leave.

use std::time::Duration;

use super::{Case, over_http};
use crate::world::{World, eventually};

pub(super) fn cases() -> Vec<Case> {
    vec![
        over_http("an unknown template is a 404 that says where the list is", unknown),
        over_http("a body that announces more than the limit is a 413", announced),
        over_http("a chunked body that exceeds the limit is a 413", chunked),
        over_http("a caller that leaves before the answer frees the VM", leaves_early),
        over_http("a caller that leaves amid the answer frees the VM", leaves_amid),
    ]
}

fn unknown(world: &World) {
    for name in ["nothing-of-the-kind", "Not_A_Name", "%2e%2e", ""] {
        let answer = world.api.post(&format!("/invoke/{name}/"), b"x");
        assert_eq!(answer.status(), 404, "{}", answer.text());
        assert!(answer.text().contains("/v1/templates"), "{}", answer.text());
        assert_eq!(answer.json()["error"]["code"], "unknown_template");
    }
}

/// The server's limit, from its refusal.
fn announced(world: &World) {
    assert!(limit(world) >= 10 << 20);
}

fn limit(world: &World) -> usize {
    let mut exchange = world.api.begin("POST", "/invoke/wordcount/", &[("Content-Length", "1000000000000")]).unwrap();
    let head = exchange.head().unwrap();
    assert_eq!(head.status, 413);
    let body: serde_json::Value = serde_json::from_slice(&exchange.rest(&head).unwrap()).unwrap();
    assert_eq!(body["error"]["code"], "body_too_large", "{body}");
    body["error"]["limit"].as_u64().unwrap().try_into().unwrap()
}

fn chunked(world: &World) {
    let limit = limit(world);
    let mut exchange =
        world.api.begin("POST", "/invoke/identity/inspect", &[("Transfer-Encoding", "chunked")]).unwrap();
    let piece = vec![b'x'; 1 << 20];
    let mut sent = 0;
    // The server may stop listening once it has refused.
    while sent <= limit && exchange.send_chunk(&piece).is_ok() {
        sent += piece.len();
    }
    let _ = exchange.send_chunk(b"");
    let head = exchange.head().unwrap();
    assert_eq!(head.status, 413);
    let text = String::from_utf8(exchange.rest(&head).unwrap()).unwrap();
    assert!(text.contains("body_too_large"), "{text}");
}

/// Well before the function would have ended by itself. Returns whether the caller had a VM when it left, as far as can be known.
fn freed(world: &World, id: &str) -> bool {
    eventually("no claimed VM", Duration::from_secs(30), || (world.pool("identity")["claimed"] == 0).then_some(()));
    if let Some(server) = &world.server {
        let line = server.log.line("invocation", |fields| fields["request_id"] == id);
        assert_eq!(line["status"], 499, "{line}");
        return line["vm"].is_string();
    }
    true
}

fn leaves_early(world: &World) {
    // Later requests that were answered make it likely, but not sure, that ours has reached its VM: the more, the likelier.
    let had_a_vm = (1..6).any(|later| {
        let id = format!("e2e-leaves-early-{later}");
        let exchange = world.api.begin("GET", "/invoke/identity/sleep/55", &[("X-Request-Id", &id)]).unwrap();
        (0..later).for_each(|_| drop(world.api.get("/invoke/identity/").success()));
        drop(exchange);
        freed(world, &id)
    });
    assert!(had_a_vm, "every caller left before it had a VM");
}

fn leaves_amid(world: &World) {
    let id = "e2e-leaves-amid";
    let mut exchange = world.api.begin("GET", "/invoke/identity/drip?n=2&pause=300", &[("X-Request-Id", id)]).unwrap();
    assert_eq!(exchange.head().unwrap().status, 200);
    assert_eq!(exchange.chunk().unwrap().unwrap(), b"0\n");
    drop(exchange);
    assert!(freed(world, id), "it left before it had a VM");
}
