//! Many requests at once to paused sandboxes: one resume, and every body arrives whole; what a crowd began survives the server, and a crowd
//! that leaves is in nobody's way.

use std::{collections::BTreeSet, sync::mpsc, thread, time::Duration};

use serde_json::{Value, json};

use super::{
    Case, of_the_bare_guest,
    sandboxes::{command, create, kill, show},
    templates,
};
use crate::{
    chance::Chance,
    fixtures,
    server::Server,
    world::{World, becomes},
};

const REQUESTS: u64 = 64;
/// Of a body: more than the gateway reads ahead of a claim, and than one packet of vsock carries.
const LENGTH: usize = 70_000;
/// Sandboxes that are woken when the server is killed, each by so many requests, and how often.
const SANDBOXES: usize = 6;
const EACH: usize = 4;
const KILLS: usize = 10;
/// Within what time all of a crowd have left.
const MOMENTS: Duration = Duration::from_millis(60);
/// Who leaves at once, and how often.
const LEAVERS: u32 = 16;
const ROUNDS: usize = 8;
/// How long anything may take on a loaded machine.
const SOON: Duration = Duration::from_secs(60);

pub(super) fn cases() -> Vec<Case> {
    vec![
        of_the_bare_guest("a crowd wakes a paused sandbox once, and every body arrives", crowds),
        of_the_bare_guest("a server killed while crowds wake its sandboxes loses none of them", killed),
        of_the_bare_guest("a sandbox reaches the disk while a crowd leaves it", leaving),
    ]
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

fn killed(world: &World) {
    let mut chance = Chance::of("crowds");
    let data = world.place("crowds-killed");
    let server = Server::start_bare(&data, &[]);
    templates::build(&server.api(), "/v1/templates", &fixtures::bare("crowded", ""));
    let ids: Vec<_> = (0..SANDBOXES).map(|_| create(&server.api(), &json!({ "template": "crowded" }))).collect();
    for (number, id) in ids.iter().enumerate() {
        let kept = server.api().call("PUT", &format!("/sandbox/{id}/memory"), &[], format!("{number}").as_bytes());
        assert_eq!(kept.status(), 200, "{}", kept.text());
    }
    let (mut answered, mut cut, mut woken) = (0, 0, 0);
    let server = (0..KILLS).fold(server, |server, round| {
        let api = server.api();
        for (number, id) in ids.iter().enumerate() {
            let to = ["ram", "disk"][(number + round) % 2];
            command(&api, id, "pause", &json!({ "to": to })).success();
        }
        thread::scope(|scope| {
            let (told, answers) = mpsc::channel();
            for (number, id) in ids.iter().enumerate().cycle().take(SANDBOXES * EACH) {
                let (api, told) = (&api, told.clone());
                scope.spawn(move || {
                    let answer = api.try_call("GET", &format!("/sandbox/{id}/memory"), &[], b"");
                    told.send(answer.map(|answer| (answer.status(), answer.text(), number.to_string()))).unwrap();
                });
            }
            drop(told);
            let mut is_cut = |answer| match answer {
                Ok((status, holds, held)) => {
                    assert_eq!((status, &holds), (200, &held));
                    answered += 1;
                    None
                }
                Err(error) => Some(error),
            };
            // Another moment each time: some are answered, and some are not.
            for _ in 0..=chance.below((SANDBOXES * EACH / 2) as u64) {
                let cut = is_cut(answers.recv_timeout(SOON).expect("nobody is answered"));
                assert!(cut.is_none(), "nothing was killed, but {cut:?}");
            }
            server.kill();
            cut += answers.into_iter().filter_map(is_cut).count();
        });
        let events = |event| server.log.count("sandbox", |fields| fields["event"] == event);
        woken += events("resume-begun").saturating_sub(events("resumed"));
        let server = Server::start_bare(&data, &[]);
        for (number, id) in ids.iter().enumerate() {
            let answer = server.api().get(&format!("/sandbox/{id}/memory"));
            assert_eq!((answer.status(), answer.text()), (200, number.to_string()), "{}", show(&server.api(), id));
        }
        server
    });
    println!(
        "{KILLS} kills amid the waking of {SANDBOXES}: {answered} answers, {cut} cut by the kill; {woken} were being woken then"
    );
    assert!(answered > 0 && cut > 0 && woken > 0, "no kill came amid the waking");
    ids.iter().for_each(|id| kill(&server.api(), id));
    assert_eq!(server.stop(), Vec::<String>::new());
}

fn leaving(world: &World) {
    let mut chance = Chance::of("leaving");
    let server = Server::start_bare(&world.place("leaving"), &[]);
    let api = server.api();
    templates::build(&api, "/v1/templates", &fixtures::bare("crowded", ""));
    let id = create(&api, &json!({ "template": "crowded" }));
    for round in 0..ROUNDS {
        let kept = api.call("PUT", &format!("/sandbox/{id}/memory"), &[], round.to_string().as_bytes());
        assert_eq!(kept.status(), 200, "{}", kept.text());
        // Each waits for longer than it stays.
        let wait = format!("/sandbox/{id}/wait/{}", SOON.as_micros());
        let crowd: Vec<_> = (0..LEAVERS).map(|_| api.begin("GET", &wait, &[]).unwrap()).collect();
        becomes(&json!(LEAVERS), SOON, || show(&api, &id)["requests"].clone());
        let paused = thread::scope(|scope| {
            let pausing = scope.spawn(|| command(&api, &id, "pause", &json!({ "to": "disk" })));
            for one in crowd {
                chance.pass(MOMENTS / LEAVERS);
                drop(one);
            }
            pausing.join().unwrap()
        });
        assert_eq!(paused.success()["state"], "hibernated", "round {round}");
        assert_eq!(api.get(&format!("/sandbox/{id}/memory")).text(), round.to_string());
    }
    kill(&api, &id);
    assert_eq!(server.stop(), Vec::<String>::new());
}
