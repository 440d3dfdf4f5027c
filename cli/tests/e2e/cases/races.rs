//! A pause and a request at once, two hundred times: whoever is first, the request is answered, once, in one life of its VM.

use std::{thread, time::Duration};

use serde_json::{Value, json};

use super::{
    Case, on_the_host,
    sandboxes::{command, create, kill},
};
use crate::{chance::Chance, http::Api, lane, log::Log, world::World};

/// How many pauses meet a request.
const RACES: u64 = 200;
/// Within what time either comes: about as long as a request takes, so that each meets each moment of the other.
const MOMENTS: Duration = Duration::from_millis(80);

pub(super) fn cases() -> Vec<Case> {
    vec![on_the_host("a pause never loses, repeats or stops a request, however they meet", races)]
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
    let log = &world.host().log;
    thread::scope(|scope| {
        for by in ALL {
            let chance = chance.branch();
            scope.spawn(move || one(&world.api, log, by, chance, rounds));
        }
    });
}

/// All races of one sandbox. Its function counts in memory how often it was called.
fn one(api: &Api, log: &Log, by: By, mut chance: Chance, rounds: u64) {
    let idle = if by == By::Idleness { "20ms" } else { "0s" };
    let id = create(api, &json!({ "idle": idle, "on_timeout": "pause" }));
    let mut resumed = 0;
    for round in 0..rounds {
        let (mut pauses, mut asks) = (chance.branch(), chance.branch());
        let answer = thread::scope(|scope| {
            scope.spawn(|| pause(api, &id, by, &mut pauses));
            asks.pass(MOMENTS);
            api.get(&format!("/sandbox/{id}/visit/{round}"))
        });
        let (visit, start) = (answer.success(), answer.header("x-stasis-start"));
        assert_eq!(visit["number"], round + 1, "{by:?}: not once: {visit}");
        let lives = visit["lives"].as_array().unwrap();
        assert!(lives[0].is_string() && lives[0] == lives[1], "{by:?}: paused while a request was in it: {visit}");
        resumed += u64::from(start == "resumed");
    }
    let visits = api.get(&format!("/sandbox/{id}/visits")).success();
    let sent: Vec<_> = (0..rounds).map(|round| round.to_string()).collect();
    assert_eq!(visits["visits"], json!(sent), "{by:?}");
    let events = |event| log.count("sandbox", |fields: &Value| fields["sandbox"] == *id && fields["event"] == event);
    let [begun, paused, called_off, hibernated] = ["pause-begun", "paused", "still-running", "hibernated"].map(events);
    println!(
        "pauses against {rounds} requests, {by:?}: {begun} begun, {paused} done, {called_off} called off, {hibernated} to disk; \
         {resumed} requests resumed it, {} found it running",
        rounds - resumed
    );
    assert!(paused > 0 && resumed > 0, "{by:?}: nothing was tried");
    kill(api, &id);
}

/// Something that pauses it, sooner or later; or is refused, and says so.
fn pause(api: &Api, id: &str, by: By, chance: &mut Chance) {
    chance.pass(MOMENTS);
    let answer = match by {
        By::Idleness => return,
        By::Hand(to) => command(api, id, "pause", &json!({ "to": to })),
        By::Deadline => command(api, id, "timeout", &json!({ "timeout": format!("{}ms", 1 + chance.below(80)) })),
    };
    match answer.status() {
        200 => {}
        // It is paused already; or a request has resumed it before it was on the disk.
        409 | 503 if matches!(by, By::Hand(_)) => {
            let code = &answer.json()["error"]["code"];
            assert!(code == "wrong_state" || code == "not_done", "{}", answer.text());
        }
        _ => panic!("{by:?}: {}", answer.text()),
    }
}
