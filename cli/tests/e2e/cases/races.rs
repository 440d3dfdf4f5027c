//! A pause and a request at once, two hundred times: whoever is first, the request is answered, once, in one life of its VM.

use std::{thread, time::Duration};

use serde_json::{Value, json};

use super::{
    Case, of_the_bare_guest,
    sandboxes::{command, create, kill},
    templates,
};
use crate::{chance::Chance, fixtures, http::Api, lane, log::Log, server::Server, world::World};

/// How many pauses meet a request.
const RACES: u64 = 200;
/// How long a request takes.
const REQUEST: Duration = Duration::from_millis(20);
/// Within what time both come: so that each meets each moment of the other.
const MOMENTS: Duration = Duration::from_millis(50);

pub(super) fn cases() -> Vec<Case> {
    vec![of_the_bare_guest("a pause never loses, repeats or stops a request, however they meet", races)]
}

/// What pauses a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Hand(&'static str),
    Deadline,
    Idleness,
}

const ALL: [By; 4] = [By::Hand("ram"), By::Hand("disk"), By::Deadline, By::Idleness];

fn races(world: &World) {
    let mut chance = Chance::of("races");
    let rounds = lane::number("STASIS_E2E_RACES", RACES).div_ceil(ALL.len() as u64);
    let server = Server::start_bare(&world.place("races"), &[]);
    let api = server.api();
    templates::build(&api, "/v1/templates", &fixtures::bare("raced", ""));
    thread::scope(|scope| {
        for by in ALL {
            let (api, log, chance) = (&api, &server.log, chance.branch());
            scope.spawn(move || one(api, log, by, chance, rounds));
        }
    });
    assert_eq!(server.stop(), Vec::<String>::new());
}

/// All races of one sandbox. Its function counts in memory how many requests it was given, and gives no answer in another life of the VM than
/// the one in which it was asked: a pause under a request is a request without an answer.
fn one(api: &Api, log: &Log, by: By, mut chance: Chance, rounds: u64) {
    let idle = if by == By::Idleness { "20ms" } else { "0s" };
    let id = create(api, &json!({ "template": "raced", "idle": idle, "on_timeout": "pause" }));
    let mut resumed = 0;
    for round in 0..rounds {
        let (mut pauses, mut asks) = (chance.branch(), chance.branch());
        let answer = thread::scope(|scope| {
            scope.spawn(|| pause(api, &id, by, &mut pauses));
            asks.pass(MOMENTS);
            api.get(&format!("/sandbox/{id}/wait/{}", REQUEST.as_micros()))
        });
        assert_eq!((answer.status(), answer.text().as_str()), (200, "waited\n"), "{by:?}, round {round}");
        resumed += u64::from(answer.header("x-stasis-start") == "resumed");
    }
    let guest = api.get(&format!("/sandbox/{id}/identity")).success();
    assert_eq!(guest["answered"], rounds + 1, "{by:?}: each once, and this one: {guest}");
    let events = |event| log.count("sandbox", |fields: &Value| fields["sandbox"] == *id && fields["event"] == event);
    let [begun, paused, called_off, hibernated] = ["pause-begun", "paused", "still-running", "hibernated"].map(events);
    println!(
        "pauses against {rounds} requests, {by:?}: {begun} begun, {paused} done, {called_off} called off, {hibernated} to disk; \
         {resumed} requests resumed it, {} found it running",
        rounds - resumed
    );
    assert!(begun > 0, "{by:?}: nothing was tried");
    kill(api, &id);
}

/// Something that pauses it, sooner or later; or is refused, and says so.
fn pause(api: &Api, id: &str, by: By, chance: &mut Chance) {
    chance.pass(MOMENTS);
    let answer = match by {
        By::Idleness => return,
        By::Hand(to) => command(api, id, "pause", &json!({ "to": to })),
        By::Deadline => command(api, id, "timeout", &json!({ "timeout": format!("{}ms", 1 + chance.below(50)) })),
    };
    match answer.status() {
        200 => {}
        // It is paused already; or a request has resumed it before it was on the disk.
        409 if matches!(by, By::Hand(_)) => {
            assert_eq!(answer.json()["error"]["code"], "wrong_state", "{}", answer.text());
        }
        _ => panic!("{by:?}: {}", answer.text()),
    }
}
