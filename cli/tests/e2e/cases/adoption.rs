//! Sandboxes and a server that is killed: they outlive it, and the next one takes them over.

use std::{
    fs,
    process::{Command, Stdio},
    sync::mpsc::{self, Sender},
    thread,
    time::Duration,
};

use serde_json::{Value, json};

use super::{
    Case, on_the_host,
    sandboxes::{command, create, identity, kill, show},
    templates,
};
use crate::{
    cli::finish,
    fixtures, host,
    http::Api,
    lane,
    server::Server,
    world::{World, eventually},
};

/// How often the server is killed in the midst of work.
const KILLS: usize = 20;
/// How long anything may take on a loaded machine.
const SOON: Duration = Duration::from_secs(60);

pub(super) fn cases() -> Vec<Case> {
    vec![on_the_host("after kill -9 sandboxes go on where they were, again and again, and nothing else stays", killed)]
}

/// A sandbox, and what its guest holds in RAM.
struct Kept {
    id: String,
    value: Value,
    counter: u64,
}

impl Kept {
    fn new(api: &Api) -> Self {
        let id = create(api, &json!({}));
        let (now, _) = identity(api, &id);
        Self { id, value: now["value"].clone(), counter: now["counter"].as_u64().unwrap() }
    }

    /// It answers, and is the one that it was.
    fn answers(&mut self, api: &Api) -> String {
        let (now, start) = identity(api, &self.id);
        let counter = now["counter"].as_u64().unwrap();
        assert!(now["value"] == self.value && counter > self.counter, "{now}, behind {} calls", self.counter);
        self.counter = counter;
        start
    }
}

/// What a server and its sandboxes take of the host, by kind.
fn ledger(server: &Server) -> Vec<(&'static str, usize)> {
    let data = server.data().to_str().unwrap();
    let entries = |folder: &str| fs::read_dir(server.files().join(folder)).unwrap().count();
    let processes = host::leftovers(server.data()).iter().filter(|left| left.starts_with("process")).count();
    let sandboxes = server.api().get("/v1/sandboxes").success();
    vec![
        ("processes", processes),
        ("mounts", host::mounts(data).len()),
        ("loop devices", host::loop_devices(data).len()),
        ("saved", entries("sandboxes")),
        ("kept", entries("vms")),
        ("records", sandboxes["sandboxes"].as_array().unwrap().len()),
    ]
}

fn killed(world: &World) {
    let data = world.place("sandboxes");
    let server = Server::start(&data, &[]);
    templates::build(&server.api(), "/v1/templates", &fixtures::identity_as("identity"));
    let bare = eventually("a VM stands ready", SOON, || {
        let ledger = ledger(&server);
        (ledger[0].1 == 2).then_some(ledger)
    });
    let mut all = [(); 3].map(|()| Kept::new(&server.api()));
    let server = in_each_state(server, &mut all);
    let server = (0..KILLS).fold(server, |server, round| in_the_midst(server, &mut all, round));

    // An orderly stop brings them to disk.
    assert_eq!(server.stop(), Vec::<String>::new());
    let server = Server::start(&data, &[]);
    let api = server.api();
    for kept in &mut all {
        assert_eq!(show(&api, &kept.id)["state"], "hibernated");
        assert_eq!(kept.answers(&api), "resumed");
    }
    for left in api.get("/v1/sandboxes").success()["sandboxes"].as_array().unwrap() {
        kill(&api, left["id"].as_str().unwrap());
    }
    eventually("what it took is given back", SOON, || (ledger(&server) == bare).then_some(()));

    // Without a next one, `stasis down` ends them.
    let last = Kept::new(&api);
    let pid = show(&api, &last.id)["pid"].as_u64().unwrap();
    server.kill();
    let vm = host::Process::open(u32::try_from(pid).unwrap()).expect("it outlives its server");
    let told = finish(Command::new(lane::binary()).args(["down", "--data"]).arg(&data).stdin(Stdio::null()));
    assert!(told.code == 0 && told.stdout.contains("left running"), "{told:?}");
    assert!(vm.ends_within(Duration::ZERO), "it lives");
    assert_eq!(host::leftovers(&data), Vec::<String>::new());
}

/// Killed while one runs, one is suspended and one hibernated.
fn in_each_state(server: Server, all: &mut [Kept; 3]) -> Server {
    let api = server.api();
    command(&api, &all[1].id, "pause", &json!({ "to": "ram" })).success();
    command(&api, &all[2].id, "pause", &json!({ "to": "disk" })).success();
    let before = all.each_ref().map(|kept| show(&api, &kept.id));
    let data = server.data().to_owned();
    server.kill();
    drop(server);

    let server = Server::start(&data, &[]);
    let api = server.api();
    for ((kept, before), start) in all.iter_mut().zip(before).zip(["running", "resumed", "resumed"]) {
        let now = show(&api, &kept.id);
        for same in ["state", "pid", "certificate", "ends_at", "time_left_ms", "metadata"] {
            assert_eq!(now[same], before[same], "{same}: {now}");
        }
        assert_eq!(now["requests"], 0, "{now}");
        assert_eq!(kept.answers(&api), start);
    }
    server
}

/// Killed while somebody is at work on each.
fn in_the_midst(server: Server, all: &mut [Kept; 3], round: usize) -> Server {
    let api = server.api();
    let data = server.data().to_owned();
    thread::scope(|scope| {
        let (done, steps) = mpsc::channel();
        for (kept, offset) in all.iter().zip(0..) {
            let (api, done) = (&api, done.clone());
            scope.spawn(move || work(api, &kept.id, offset + round, &done));
        }
        // Another point each time.
        for _ in 0..=round * 5 % 7 {
            steps.recv_timeout(SOON).expect("nothing is done");
        }
        server.kill();
    });
    drop(server);
    let server = Server::start(&data, &[]);
    let api = server.api();
    for kept in all {
        kept.answers(&api);
    }
    server
}

/// Pauses and resumes a sandbox in all ways until nobody answers any more.
fn work(api: &Api, id: &str, offset: usize, done: &Sender<()>) {
    const VERBS: [(&str, &str, &[u8]); 6] = [
        ("POST", "/v1/sandboxes/ID/pause", br#"{"to":"ram"}"#),
        ("GET", "/sandbox/ID/", b""),
        ("POST", "/v1/sandboxes/ID/pause", br#"{"to":"disk"}"#),
        ("POST", "/v1/sandboxes/ID/resume", b"{}"),
        ("POST", "/v1/sandboxes/ID/pause", br#"{"to":"ram"}"#),
        ("POST", "/v1/sandboxes/ID/resume", b"{}"),
    ];
    for (method, target, body) in VERBS.into_iter().cycle().skip(offset) {
        if api.try_call(method, &target.replace("ID", id), &[], body).is_err() {
            return;
        }
        // Enough was done, perhaps: the end is near.
        let _ = done.send(());
    }
}
