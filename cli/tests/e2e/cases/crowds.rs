//! Many requests at once, each with a body, to a paused sandbox: one resume, and every body arrives whole.

use std::{collections::BTreeSet, thread};

use serde_json::{Value, json};

use super::{
    Case, of_the_bare_guest,
    sandboxes::{command, create, kill},
    templates,
};
use crate::{fixtures, server::Server, world::World};

const REQUESTS: u64 = 64;
/// Of a body: more than the gateway reads ahead of a claim, and than one packet of vsock carries.
const LENGTH: usize = 70_000;

pub(super) fn cases() -> Vec<Case> {
    vec![of_the_bare_guest("a crowd wakes a paused sandbox once, and every body arrives", crowds)]
}

fn crowds(world: &World) {
    let server = Server::start_bare(&world.place("crowds"), &[]);
    let api = server.api();
    templates::build(&api, "/v1/templates", &fixtures::bare("crowded", ""));
    let id = create(&api, &json!({ "template": "crowded", "idle": "0s", "hibernate_after": "0s" }));
    let resumed = |fields: &Value| fields["sandbox"] == *id && fields["event"] == "resumed";
    let bodies: BTreeSet<_> = (0..REQUESTS).map(|number| format!("{number} {}", "x".repeat(LENGTH))).collect();
    for (round, to) in (1..).zip(["ram", "disk", "ram", "disk"]) {
        command(&api, &id, "pause", &json!({ "to": to })).success();
        thread::scope(|scope| {
            for body in &bodies {
                let (api, id) = (&api, &id);
                scope.spawn(move || {
                    let answer = api.call("PUT", &format!("/sandbox/{id}/memory"), &[], body.as_bytes());
                    assert_eq!((answer.status(), answer.text().as_str()), (200, "kept\n"), "to {to}");
                });
            }
        });
        // The last of them, whole.
        assert!(bodies.contains(&api.get(&format!("/sandbox/{id}/memory")).text()), "to {to}");
        let guest = api.get(&format!("/sandbox/{id}/identity")).success();
        assert_eq!(guest["answered"], round * (REQUESTS + 2), "each once: {guest}");
        let resumes = usize::try_from(round).unwrap();
        server.log.counts(resumes, "sandbox", resumed);
        assert_eq!(server.log.count("sandbox", resumed), resumes, "one for all of them");
    }
    kill(&api, &id);
    assert_eq!(server.stop(), Vec::<String>::new());
}
