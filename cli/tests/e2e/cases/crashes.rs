//! Functions that break their answer off.

use serde_json::Value;

use super::{Case, on_the_host, over_http};
use crate::world::World;

pub(super) fn cases() -> Vec<Case> {
    vec![
        over_http("a function that crashes is a 502 with the request's id", |world| {
            failed(world, "crash", "e2e-crash");
        }),
        over_http("a function that crashes amid its answer is a 502 with the request's id", |world| {
            failed(world, "crash-mid", "e2e-crash-mid");
        }),
        over_http("a function that crashes amid a stream cuts it", cut),
        on_the_host("the log has a crashed function's console under the request's id", console),
        over_http("the next invocation after a crash is answered", |world| {
            failed(world, "crash", "e2e-crash-then");
            world.api.get("/invoke/identity/").success();
        }),
    ]
}

fn failed(world: &World, route: &str, id: &str) -> Value {
    let answer = world.api.call("GET", &format!("/invoke/identity/{route}"), &[("X-Request-Id", id)], b"");
    assert_eq!(answer.status(), 502, "{}", answer.text());
    assert_eq!(answer.header("x-request-id"), id);
    let body = answer.json();
    assert_eq!(body["request_id"], id);
    assert_eq!(body["error"]["code"], "function_failed");
    body
}

fn cut(world: &World) {
    let mut exchange = world.api.begin("GET", "/invoke/identity/crash-stream", &[]).unwrap();
    let head = exchange.head().unwrap();
    assert_eq!(head.status, 200);
    assert_eq!(exchange.chunk().unwrap().unwrap(), b"before the crash\n");
    let end = exchange.chunk();
    assert!(end.is_err(), "the answer ended as if it were whole: {end:?}");
}

fn console(world: &World) {
    for route in ["crash", "crash-mid"] {
        let id = format!("e2e-console-{route}");
        failed(world, route, &id);
        let line = world.host().log.line("the function broke a request off", |fields| fields["request"] == id.as_str());
        let console = line["console"].as_str().unwrap();
        assert!(console.contains("exited with status 3"), "the console does not tell of the crash: {console:?}");
    }
}
