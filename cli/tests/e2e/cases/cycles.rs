//! Twenty pauses of one sandbox, each in another way than the one before, and each ended in another.

use serde_json::{Value, json};

use super::{
    Case, on_the_host,
    sandboxes::{command, create, kill, show},
};
use crate::{http::Api, log::Log, world::World};

const CYCLES: usize = 20;

pub(super) fn cases() -> Vec<Case> {
    vec![on_the_host(
        "memory, an open file, a process and the disk go through twenty pauses by hand, by time and by idleness",
        cycles,
    )]
}

/// The sandbox, and what tells of its pauses.
struct Sandbox<'a> {
    api: &'a Api,
    log: &'a Log,
    id: String,
}

/// What it is called, what does it, and what then shows it.
type Way = (&'static str, fn(&Sandbox), &'static str);

/// What pauses it, and the state in which it then is. Their number and that of the ways to resume have no common divisor: each meets
/// each.
const PAUSES: [Way; 5] = [
    ("by hand, to RAM", |sandbox| sandbox.pause("ram"), "suspended"),
    ("its time is over", |sandbox| sandbox.let_its_time_be_over(), "suspended"),
    ("by hand, to disk", |sandbox| sandbox.pause("disk"), "hibernated"),
    ("idle", |sandbox| sandbox.let_it_be_idle(), "suspended"),
    (
        "its time is over, then to disk",
        |sandbox| {
            sandbox.let_its_time_be_over();
            sandbox.pause("disk")
        },
        "hibernated",
    ),
];

/// What resumes it, and how the next request finds it.
const RESUMES: [Way; 3] = [
    ("by a request", |_| {}, "resumed"),
    ("by hand", |sandbox| sandbox.resume(), "running"),
    ("by a command", |sandbox| sandbox.run(), "running"),
];

impl Sandbox<'_> {
    fn pause(&self, to: &str) {
        command(self.api, &self.id, "pause", &json!({ "to": to })).success();
    }

    fn pauses(&self) -> usize {
        self.log.count("sandbox", |fields| self.was(fields, "paused"))
    }

    fn was(&self, fields: &Value, event: &str) -> bool {
        fields["sandbox"] == *self.id && fields["event"] == event
    }

    /// Does something that leads to one more pause, and waits for that.
    fn awaits_a_pause(&self, lead: impl FnOnce()) {
        let next = self.pauses() + 1;
        lead();
        self.log.counts(next, "sandbox", |fields| self.was(fields, "paused"));
    }

    fn set_timeout(&self, timeout: &str) {
        command(self.api, &self.id, "timeout", &json!({ "timeout": timeout })).success();
    }

    /// A hold does not keep it from pausing then.
    fn let_its_time_be_over(&self) {
        self.awaits_a_pause(|| self.set_timeout("1ms"));
        self.set_timeout("1h");
    }

    fn hold(&self) {
        command(self.api, &self.id, "hold", &json!({ "name": "case" })).success();
    }

    fn let_it_be_idle(&self) {
        self.awaits_a_pause(|| {
            self.api.call("DELETE", &format!("/v1/sandboxes/{}/hold/case", self.id), &[], b"").success();
        });
        self.hold();
    }

    fn resume(&self) {
        let resumed = command(self.api, &self.id, "resume", &json!({}));
        assert_eq!(resumed.status(), 201, "{}", resumed.text());
    }

    fn run(&self) {
        let ran = command(self.api, &self.id, "exec", &json!({ "command": ["true"] }));
        assert_eq!((ran.status(), ran.text().as_str()), (200, "{\"event\":\"exited\",\"status\":0}\n"));
    }

    fn state(&self) -> Value {
        show(self.api, &self.id)["state"].clone()
    }

    fn generation(&self) -> u64 {
        show(self.api, &self.id)["certificate"]["generation"].as_u64().unwrap()
    }
}

/// A token is added in each cycle, and all that were added before are there.
fn cycles(world: &World) {
    let api = &world.api;
    let id = create(api, &json!({ "idle": "1ms", "on_timeout": "pause" }));
    let sandbox = Sandbox { api, log: &world.host().log, id };
    sandbox.hold();
    let mut process = None;
    let mut tokens: Vec<String> = Vec::new();
    let mut add = |start: Option<&str>, how: &str| {
        tokens.push(format!("token-{}", tokens.len()));
        let (last, number) = (tokens.last().unwrap(), tokens.len());
        let answer = api.get(&format!("/sandbox/{}/keep/{last}", sandbox.id));
        let kept = answer.success();
        for place in ["memory", "file", "disk"] {
            assert_eq!(kept[place], json!(tokens), "{place}, {how}");
        }
        assert_eq!(kept["process"]["said"], format!("{number} {last}"), "{how}");
        assert_eq!(process.get_or_insert_with(|| kept["process"]["pid"].clone()), &kept["process"]["pid"], "{how}");
        assert!(start.is_none_or(|start| start == answer.header("x-stasis-start")), "{:?}, {how}", answer.head);
    };
    add(None, "at first");
    let (mut generation, pauses) = (sandbox.generation(), sandbox.pauses());
    for cycle in 0..CYCLES {
        let (pause, begin, state) = PAUSES[cycle % PAUSES.len()];
        let (resume, end, start) = RESUMES[cycle % RESUMES.len()];
        let how = format!("cycle {cycle}: paused ({pause}), resumed {resume}");
        begin(&sandbox);
        assert_eq!(sandbox.state(), state, "{how}");
        end(&sandbox);
        add(Some(start), &how);
        generation += 1;
        assert_eq!(sandbox.generation(), generation, "one life more, {how}");
    }
    assert_eq!(sandbox.pauses() - pauses, CYCLES, "one pause in each cycle");
    kill(api, &sandbox.id);
}
