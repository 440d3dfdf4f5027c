//! Requests and answers pass through as they are, with ours beside them.

use std::{thread, time::Duration};

use serde_json::json;

use super::{Case, over_http};
use crate::{
    http::{Exchange, Head},
    world::{World, eventually, pool},
};

pub(super) fn cases() -> Vec<Case> {
    vec![
        over_http("method, path, query, headers and body arrive as they were sent", as_sent),
        over_http("a function's status arrives as it was given", statuses),
        over_http("bodies stream both ways", both_ways),
        over_http("an answer says which VM gave it and where the time went", where_time_went),
        over_http("a claim finds a paused VM, and restores one when there is none", paused_and_cold),
    ]
}

fn as_sent(world: &World) {
    let odd = "/inspect//a/../b%2Fc;d/%e4%F6/";
    for method in ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
        let body = if method == "GET" { b"".as_slice() } else { b"\0\xff body" };
        let headers = [("X-Mine", "one"), ("X-Mine", "two; q=\"ä\""), ("X-Request-Id", "e2e-as-sent")];
        let target = format!("/invoke/identity{odd}?x=1&x=2&y=%20+%2B&z=/invoke/other");
        let answer = world.api.call(method, &target, &headers, body);
        assert_eq!(answer.header("x-request-id"), "e2e-as-sent");
        let seen = answer.success();
        assert_eq!(seen["method"], method);
        assert_eq!(seen["path"], odd);
        assert_eq!(seen["query"], "x=1&x=2&y=%20+%2B&z=/invoke/other");
        assert_eq!(seen["body_bytes"], body.len());
        let of = |name: &str| {
            let headers = seen["headers"].as_array().unwrap().iter();
            let named = headers.filter(|header| header[0].as_str().unwrap().eq_ignore_ascii_case(name));
            named.map(|header| header[1].clone()).collect::<Vec<_>>()
        };
        // Python's server reads headers as Latin-1.
        assert_eq!(of("x-mine"), [json!("one"), json!("two; q=\"Ã¤\"")]);
        assert_eq!(of("x-request-id"), [json!("e2e-as-sent")]);
        assert_eq!(of("host"), [json!(world.api.authority())]);
    }
    let head = world.api.call("HEAD", "/invoke/identity/bytes/1234", &[], b"");
    assert_eq!((head.status(), head.header("content-length")), (200, "1234"));
}

fn statuses(world: &World) {
    for status in [201, 204, 302, 404, 418, 500, 503] {
        assert_eq!(world.api.get(&format!("/invoke/identity/status/{status}")).status(), status);
    }
}

fn both_ways(world: &World) {
    let headers = [("Transfer-Encoding", "chunked"), ("Content-Type", "text/x-mine")];
    let mut exchange = world.api.begin("POST", "/invoke/identity/echo", &headers).unwrap();
    exchange.send_chunk(b"the first").unwrap();
    // The request is still open: its answer begins all the same.
    let head = exchange.head().unwrap();
    assert_eq!((head.status, head.header("content-type")), (200, Some("text/x-mine")));
    assert_eq!(exchange.chunk().unwrap().unwrap(), b"the first");
    for number in 0..5 {
        let piece = format!("piece {number}");
        exchange.send_chunk(piece.as_bytes()).unwrap();
        assert_eq!(exchange.chunk().unwrap().unwrap(), piece.as_bytes());
    }
    exchange.send_chunk(b"").unwrap();
    assert_eq!(exchange.chunk().unwrap(), None);
}

fn where_time_went(world: &World) {
    let answer = world.api.get("/invoke/identity/");
    answer.success();
    let timing = answer.header("server-timing");
    let phases: Vec<_> = timing.split(", ").map(|phase| phase.split_once(";dur=").unwrap()).collect();
    let names: Vec<_> = phases.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["queue", "claim", "restore", "repair", "guest"], "{timing}");
    assert!(phases.iter().all(|(_, took)| took.parse::<f64>().is_ok()), "{timing}");
    assert_eq!(answer.header("x-stasis-vm").len(), 36);
    assert!(answer.header("x-request-id").len() >= 16);
}

/// What `X-Stasis-Start` says, and the restore's share of the time.
fn start(head: &Head) -> (String, f64) {
    let timing = head.header("server-timing").unwrap();
    let (_, rest) = timing.split_once("restore;dur=").unwrap();
    (head.header("x-stasis-start").unwrap().to_owned(), rest.split(',').next().unwrap().parse().unwrap())
}

/// More than are ready at once: among so many claims that hold what they got, one meets a restore.
const MOST: usize = 48;

fn paused_and_cold(world: &World) {
    let paused = eventually("a paused VM", Duration::from_secs(60), || {
        let _ = pool(&world.api, "identity")["ready"].as_u64().filter(|ready| *ready > 0)?;
        let answer = world.api.get("/invoke/identity/status/200");
        let (kind, restore) = start(&answer.head);
        (kind == "paused").then_some(restore)
    });
    assert_eq!(paused.to_string(), "0", "a paused VM is not restored while a caller waits");

    // Each holds its VM until all have one: none that was used may overtake the one that is being restored.
    let mut held = Vec::new();
    while held.iter().all(|(_, kind)| kind != "cold") {
        let ready = world.pool("identity")["ready"].as_u64().unwrap();
        assert!(held.len() < MOST, "{} claims at once were given VMs that stood ready, and {ready} do", held.len());
        thread::scope(|scope| {
            let claims: Vec<_> = (0..ready + 2).map(|_| scope.spawn(|| hold(world))).collect();
            held.extend(claims.into_iter().map(|claim| claim.join().unwrap()));
        });
    }
    for (mut exchange, _) in held {
        exchange.send_chunk(b"").unwrap();
        assert_eq!(exchange.chunk().unwrap(), None);
    }
}

/// An invocation whose body and answer have begun; and how its VM was come by.
fn hold(world: &World) -> (Exchange, String) {
    let headers = [("Transfer-Encoding", "chunked")];
    let mut exchange = world.api.begin("POST", "/invoke/identity/echo", &headers).unwrap();
    let head = exchange.head().unwrap();
    assert_eq!(head.status, 200);
    let (kind, restore) = start(&head);
    assert_eq!(kind == "cold", restore > 0.0, "{kind}, restored in {restore} ms of the caller's time");
    (exchange, kind)
}
