//! A server that is restarted in order, under load; and VMs that do not answer the next one.

use std::{
    io,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::{
    Case, of_the_bare_guest,
    sandboxes::{command, create, kill, show, taken_over},
    templates,
};
use crate::{
    cli::{Finished, finish},
    fixtures,
    host::{self, Process},
    http::{Answer, Api},
    lane,
    ledger::Ledger,
    server::Server,
    world::{World, eventually, pool},
};

/// How often it is restarted.
const RESTARTS: u64 = 5;
/// Requests of all callers before it is told to stop.
const BEFORE: usize = 50;
/// How long anything may take on a loaded machine.
const SOON: Duration = Duration::from_secs(60);

pub(super) fn cases() -> Vec<Case> {
    vec![
        of_the_bare_guest("a server that is restarted under load loses no sandbox, and leaves no VM", restarted),
        of_the_bare_guest("`stasis down` has sandboxes on disk, or names those that go on", down),
        of_the_bare_guest("a VM that does not answer the next server holds up no other", silent),
    ]
}

fn start(world: &World, name: &str) -> (Server, Ledger) {
    let server = Server::start_bare(&world.place(name), &[]);
    templates::build(&server.api(), "/v1/templates", &fixtures::bare("restarted", ""));
    eventually("a VM stands ready", SOON, || (pool(&server.api(), "restarted")["ready"] == 1).then_some(()));
    let bare = Ledger::of(&server, &[server.api()]);
    (server, bare)
}

/// A sandbox, and what its guest holds in RAM.
struct Kept {
    id: String,
    holds: String,
    answered: u64,
}

impl Kept {
    fn new(api: &Api, number: u64) -> Self {
        let id = create(api, &json!({ "template": "restarted" }));
        let holds = format!("of {number}");
        let kept = api.call("PUT", &format!("/sandbox/{id}/memory"), &[], holds.as_bytes());
        assert_eq!(kept.status(), 200, "{}", kept.text());
        Self { id, holds, answered: 1 }
    }

    /// It answers, with the memory that it had.
    fn answers(&mut self, api: &Api) {
        assert_eq!(api.get(&format!("/sandbox/{}/memory", self.id)).text(), self.holds);
        let now = api.get(&format!("/sandbox/{}/identity", self.id)).success()["answered"].as_u64().unwrap();
        assert!(now > self.answered, "{now} requests, of {} before", self.answered);
        self.answered = now;
    }
}

/// Asks until nobody listens any more. Whoever is answered is answered right, or told in our words why not.
fn ask_on(api: &Api, target: &str, done: &mpsc::Sender<()>) -> io::Error {
    loop {
        let answer: Answer = match api.try_call("GET", target, &[], b"") {
            Ok(answer) => answer,
            Err(cut) => return cut,
        };
        if answer.status() == 200 {
            assert!(answer.json()["answered"].as_u64() > Some(0), "{}", answer.text());
        } else {
            assert!(answer.json()["error"]["code"].is_string(), "{}", answer.text());
        }
        // Whoever counts may have seen enough.
        let _ = done.send(());
    }
}

fn restarted(world: &World) {
    let (mut server, bare) = start(world, "restart");
    // In each state one that is asked all the while, and one that nobody asks.
    let mut all: Vec<_> = (0..6).map(|number| Kept::new(&server.api(), number)).collect();
    for _ in 0..RESTARTS {
        let api = server.api();
        for (kept, to) in all.iter().zip([None, None, Some("ram"), Some("ram"), Some("disk"), Some("disk")]) {
            if let Some(to) = to {
                command(&api, &kept.id, "pause", &json!({ "to": to })).success();
            }
        }
        let before: Vec<_> = all.iter().map(|kept| show(&api, &kept.id)).collect();
        thread::scope(|scope| {
            let (done, asked) = mpsc::channel();
            let asleep = all.iter().skip(1).step_by(2).map(|kept| format!("/sandbox/{}/identity", kept.id));
            for target in asleep.chain(["/invoke/restarted/identity".to_owned()]) {
                let (api, done) = (&api, done.clone());
                scope.spawn(move || ask_on(api, &target, &done));
            }
            for _ in 0..BEFORE {
                asked.recv_timeout(SOON).expect("nobody is answered");
            }
            server.leave();
        });
        let data = server.data().to_owned();
        drop(server);
        server = Server::start_bare(&data, &[]);
        let api = server.api();
        for (kept, before) in all.iter().zip(before).step_by(2) {
            let now = taken_over(&api, &kept.id);
            for same in ["state", "pid", "certificate", "ends_at", "time_left_ms", "generation"] {
                assert_eq!(now[same], before[same], "{same}: {now}");
            }
        }
        for kept in &mut all {
            kept.answers(&api);
        }
    }
    let api = server.api();
    assert_eq!(api.get("/v1/sandboxes").success()["sandboxes"].as_array().map(Vec::len), Some(all.len()));
    all.iter().for_each(|kept| kill(&api, &kept.id));
    bare.returns(&server, &[api]);
    assert_eq!(server.stop(), Vec::<String>::new());
}

/// The process of a sandbox's VM.
fn process(info: &Value) -> Process {
    Process::open(u32::try_from(info["pid"].as_u64().unwrap()).unwrap()).expect("it lives")
}

fn silent(world: &World) {
    let (server, bare) = start(world, "silent");
    let mut all: Vec<_> = (0..3).map(|number| Kept::new(&server.api(), number)).collect();
    let vm = process(&show(&server.api(), &all[0].id));
    let again = |server: Server| {
        let data = server.data().to_owned();
        server.leave();
        vm.signal(Signal::STOP);
        Server::start_bare(&data, &[])
    };
    let server = again(server);
    let api = server.api();
    for kept in &mut all[1..] {
        kept.answers(&api);
    }
    let listed = api.get("/v1/sandboxes").success();
    assert!(listed["sandboxes"].as_array().unwrap().iter().all(|info| info["state"] == "running"), "{listed}");
    let mut waiting = api.begin("GET", &format!("/sandbox/{}/memory", all[0].id), &[]).unwrap();
    vm.signal(Signal::CONT);
    let head = waiting.head().unwrap();
    assert_eq!((head.status, waiting.rest(&head).unwrap()), (200, all[0].holds.clone().into_bytes()));

    // Whoever wants it gone need not wait until it answers.
    let server = again(server);
    let api = server.api();
    for kept in &all {
        kill(&api, &kept.id);
    }
    assert!(vm.ends_within(Duration::ZERO), "it lives");
    bare.returns(&server, &[api]);
    assert_eq!(server.stop(), Vec::<String>::new());
}

fn down(world: &World) {
    let (server, _) = start(world, "down");
    let data = server.data().to_owned();
    let mut all: Vec<_> = (0..2).map(|number| Kept::new(&server.api(), number)).collect();
    command(&server.api(), &all[1].id, "pause", &json!({ "to": "ram" })).success();
    let vms: Vec<_> = all.iter().map(|kept| process(&show(&server.api(), &kept.id))).collect();
    let down = |how: &[&str]| {
        finish(Command::new(lane::binary()).arg("down").args(how).arg("--data").arg(&data).stdin(Stdio::null()))
    };
    let names_all = |told: &Finished| {
        let named = |kept: &Kept, state| told.stdout.contains(&format!("{}, {state}, process", kept.id));
        assert!(named(&all[0], "running") && named(&all[1], "suspended"), "{told:?}");
        assert!(told.stdout.contains("stasis down --kill"), "{told:?}");
        assert!(vms.iter().all(|vm| !vm.ends_within(Duration::ZERO)), "one was ended");
    };
    // With a server it only stops that, without one it has nothing to save them by.
    let told = down(&["--keep"]);
    assert_eq!(told.code, 0, "{told:?}");
    names_all(&told);
    drop(server);
    let told = down(&[]);
    assert_eq!(told.code, 1, "{told:?}");
    names_all(&told);

    let server = Server::start_bare(&data, &[]);
    let told = down(&[]);
    assert!(told.code == 0 && told.stdout.starts_with("stopped ("), "{told:?}");
    drop(server);
    assert_eq!(host::leftovers(&data), Vec::<String>::new());
    let server = Server::start_bare(&data, &[]);
    for kept in &mut all {
        assert_eq!(show(&server.api(), &kept.id)["state"], "hibernated");
        kept.answers(&server.api());
    }
    let told = down(&["--kill"]);
    assert!(told.code == 0 && told.stdout.contains("sandboxes' VMs ended"), "{told:?}");
    drop(server);
    assert_eq!(host::leftovers(&data), Vec::<String>::new());
    let server = Server::start_bare(&data, &[]);
    let failed = eventually("it is found out", SOON, || {
        let info = show(&server.api(), &all[0].id);
        (info["state"] == "failed").then_some(info)
    });
    assert!(failed["failure"].as_str().unwrap().contains("its memory is gone"), "{failed}");
    all.iter().for_each(|kept| kill(&server.api(), &kept.id));
    assert_eq!(server.stop(), Vec::<String>::new());
}
