//! A pause and a request at once, two hundred times: whoever is first, the request is answered, once, in one life of its VM.

use std::{thread, time::Duration};

use serde_json::{Value, json};

use super::{
    Case, of_the_bare_guest,
    sandboxes::{command, create, kill, show},
    templates,
};
use crate::{
    chance::{self, Chance},
    fixtures,
    http::Api,
    lane,
    log::Log,
    server::Server,
    world::{World, becomes},
};

/// How many pauses meet a request.
const RACES: u64 = 200;
/// How often a kind is tried, at most, for each pause that is wanted of it.
const TRIES: u64 = 10;
/// How long a request takes.
const REQUEST: Duration = Duration::from_millis(5);
/// Within what time both come: so that each meets each moment of the other. A pause takes less, written to the store and done.
const MOMENTS: Duration = Duration::from_millis(3);
/// When a pause by time or for idleness comes, after what leads to it.
const LEAD: Duration = Duration::from_millis(5);
/// How long anything may take on a loaded machine.
const SOON: Duration = Duration::from_secs(60);

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

impl By {
    /// What a request does to such a pause that it meets in its midst, if it ends it. A pause that somebody asked for, or whose time has come, is
    /// done first, and then the sandbox is resumed: nothing from outside but a resume by hand calls it off.
    fn called_off(self) -> Option<&'static str> {
        match self {
            Self::Idleness => Some("still-running"),
            Self::Hand("disk") => Some("still-suspended"),
            Self::Hand(_) | Self::Deadline => None,
        }
    }
}

fn races(world: &World) {
    let mut chance = Chance::of("races");
    let wanted = lane::number("STASIS_E2E_RACES", RACES).div_ceil(ALL.len() as u64);
    let server = Server::start_bare(&world.place("races"), &[]);
    let api = server.api();
    templates::build(&api, "/v1/templates", &fixtures::bare("raced", ""));
    thread::scope(|scope| {
        for by in ALL {
            let (api, log, chance) = (&api, &server.log, chance.branch());
            scope.spawn(move || one(&Raced::new(api, log, by), chance, wanted));
        }
    });
    assert_eq!(server.stop(), Vec::<String>::new());
}

/// The sandbox of one kind of pause.
struct Raced<'a> {
    api: &'a Api,
    log: &'a Log,
    by: By,
    id: String,
}

/// All races of one sandbox, until so many pauses have begun. Its function counts in memory how many requests it was given, and gives no answer
/// in another life of the VM than the one in which it was asked: a pause under a request is a request without an answer.
fn one(raced: &Raced, mut chance: Chance, wanted: u64) {
    let (mut rounds, mut resumed) = (0, 0);
    let is_enough = |rounds, resumed| {
        let has_met = raced.by.called_off().is_none_or(|event| raced.count(event) > 0);
        rounds >= wanted && raced.count("pause-begun") as u64 >= wanted && has_met && (1..rounds).contains(&resumed)
    };
    while rounds < wanted || !(is_enough(rounds, resumed) || rounds == wanted * TRIES) {
        raced.is_ready();
        let (mut pauses, mut asks) = (chance.branch(), chance.branch());
        let answer = thread::scope(|scope| {
            scope.spawn(|| raced.pause(&mut pauses));
            raced.come(&mut asks);
            raced.api.get(&format!("/sandbox/{}/wait/{}", raced.id, REQUEST.as_micros()))
        });
        let told = (answer.status(), answer.text());
        assert_eq!(told, (200, "waited\n".to_owned()), "{:?}, round {rounds}", raced.by);
        rounds += 1;
        resumed += u64::from(answer.header("x-stasis-start") == "resumed");
    }
    raced.is_ready();
    let guest = raced.api.get(&format!("/sandbox/{}/identity", raced.id)).success();
    assert_eq!(guest["answered"], rounds + 1, "{:?}: each once, and this one: {guest}", raced.by);
    kill(raced.api, &raced.id);
    raced.log.line("sandbox", |fields| raced.was(fields, "removed"));
    let [begun, paused, off, hibernated, off_disk] =
        ["pause-begun", "paused", "still-running", "hibernated", "still-suspended"].map(|event| raced.count(event));
    println!(
        "pauses against {rounds} requests, {:?}: {begun} begun, {paused} done, {off} called off; {hibernated} to disk, {off_disk} called off; \
         {resumed} requests resumed it, {} found it running",
        raced.by,
        rounds - resumed
    );
    assert!(is_enough(rounds, resumed), "{:?}: they did not meet", raced.by);
}

impl<'a> Raced<'a> {
    fn new(api: &'a Api, log: &'a Log, by: By) -> Self {
        let idle = if by == By::Idleness { format!("{}ms", LEAD.as_millis()) } else { "0s".to_owned() };
        let id = create(api, &json!({ "template": "raced", "idle": idle, "on_timeout": "pause" }));
        Self { api, log, by, id }
    }

    /// It runs, with nothing under way that the last round began.
    fn is_ready(&self) {
        if self.by == By::Deadline && self.count("pause-begun") > 0 {
            // The pause that the last round led to has come, if it was put off by the request.
            becomes(&json!("suspended"), SOON, || show(self.api, &self.id)["state"].clone());
            self.set_timeout("1h");
        }
        let resumed = command(self.api, &self.id, "resume", &json!({}));
        assert!([200, 201].contains(&resumed.status()), "{:?}: {}", self.by, resumed.text());
    }

    /// Something that pauses it, sooner or later; or is refused, and says so.
    fn pause(&self, chance: &mut Chance) {
        match self.by {
            // It is so by itself.
            By::Idleness => {}
            By::Deadline => self.set_timeout(&format!("{}ms", LEAD.as_millis())),
            By::Hand(to) => {
                chance.pass(MOMENTS);
                let answer = command(self.api, &self.id, "pause", &json!({ "to": to }));
                // A request has resumed it before it was on the disk.
                let called_off = answer.status() == 409 && answer.json()["error"]["code"] == "wrong_state";
                assert!(answer.status() == 200 || called_off, "{:?}: {}", self.by, answer.text());
            }
        }
    }

    /// Lets the time pass after which a request meets the pause.
    fn come(&self, chance: &mut Chance) {
        if !matches!(self.by, By::Hand(_)) {
            chance::pass(LEAD - MOMENTS / 2);
        }
        chance.pass(MOMENTS);
    }

    fn set_timeout(&self, timeout: &str) {
        command(self.api, &self.id, "timeout", &json!({ "timeout": timeout })).success();
    }

    fn was(&self, fields: &Value, event: &str) -> bool {
        fields["sandbox"] == *self.id && fields["event"] == event
    }

    fn count(&self, event: &str) -> usize {
        self.log.count("sandbox", |fields| self.was(fields, event))
    }
}
