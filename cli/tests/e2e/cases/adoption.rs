//! Sandboxes and a server that is killed: they outlive it, and the next one takes them over.

use std::{
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use serde_json::json;

use super::{
    Case,
    mixture::{Kept, Worker},
    on_the_host,
    sandboxes::{command, kill, show, taken_over},
    templates,
};
use crate::{
    chance::Chance,
    cli::finish,
    fixtures, host, lane,
    ledger::Ledger,
    server::Server,
    world::{World, eventually},
};

/// How often the server is killed in the midst of work.
const KILLS: u64 = 20;
/// How long anything may take on a loaded machine.
const SOON: Duration = Duration::from_secs(60);

pub(super) fn cases() -> Vec<Case> {
    vec![on_the_host("after kill -9 sandboxes go on where they were, again and again, and nothing else stays", killed)]
}

fn killed(world: &World) {
    let mut chance = Chance::of("adoption");
    let data = world.place("sandboxes");
    let server = Server::start(&data, &[]);
    templates::build(&server.api(), "/v1/templates", &fixtures::identity_as("identity"));
    let bare = eventually("a VM stands ready", SOON, || {
        let ledger = Ledger::of(&server, &[server.api()]);
        (ledger.count("processes") == 2).then_some(ledger)
    });
    let mut all = [(); 3].map(|()| Kept::new(&server.api()));
    let three = eventually("another stands ready beside theirs", SOON, || {
        let ledger = Ledger::of(&server, &[server.api()]);
        (ledger.count("processes") == 2 + all.len()).then_some(ledger)
    });
    let of_each = ["processes", "uids", "kept", "records"].map(|kind| three.count(kind) - bare.count(kind));
    assert_eq!(of_each, [all.len(); 4], "{bare:?} {three:?}");
    let server = in_each_state(server, &mut all);
    three.returns(&server, &[server.api()]);
    let server = (0..lane::number("STASIS_E2E_KILLS", KILLS)).fold(server, |server, _| {
        let server = in_the_midst(server, &mut all, &mut chance);
        // Beside the three that outlive it, each kill leaves nothing.
        three.returns(&server, &[server.api()]);
        server
    });

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
    bare.returns(&server, &[server.api()]);

    // Without a next one, `stasis down` names them, and ends them when it is told to.
    let last = Kept::new(&api);
    let pid = show(&api, &last.id)["pid"].as_u64().unwrap();
    server.kill();
    let vm = host::Process::open(u32::try_from(pid).unwrap()).expect("it outlives its server");
    let down = |how: &[&str]| {
        finish(Command::new(lane::binary()).arg("down").args(how).arg("--data").arg(&data).stdin(Stdio::null()))
    };
    let told = down(&[]);
    assert!(told.code == 1 && told.stdout.contains(&format!("{}, running, process {pid}", last.id)), "{told:?}");
    assert!(!vm.ends_within(Duration::ZERO), "it was ended");
    let told = down(&["--kill"]);
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
        let now = taken_over(&api, &kept.id);
        for same in ["state", "pid", "certificate", "ends_at", "time_left_ms", "metadata"] {
            assert_eq!(now[same], before[same], "{same}: {now}");
        }
        assert_eq!(now["requests"], 0, "{now}");
        assert_eq!(kept.answers(&api), start);
    }
    server
}

/// Killed while somebody is at work on each of them, others make, fork, pause and kill sandboxes, and one invokes the template.
fn in_the_midst(server: Server, all: &mut [Kept; 3], chance: &mut Chance) -> Server {
    let api = server.api();
    let data = server.data().to_owned();
    let mut others: Vec<_> = thread::scope(|scope| {
        let (done, steps) = mpsc::channel();
        let mut worker = || Worker { api: &api, chance: chance.branch(), done: done.clone() };
        for kept in &*all {
            let worker = worker();
            scope.spawn(move || worker.pause_and_resume(&kept.id));
        }
        let makers = [(); 2].map(|()| worker()).map(|worker| scope.spawn(move || worker.make_and_kill()));
        let invoker = worker();
        scope.spawn(move || invoker.invoke());
        // Another moment each time.
        for _ in 0..=chance.below(24) {
            steps.recv_timeout(SOON).expect("nothing is done");
        }
        chance.pass(Duration::from_millis(100));
        server.kill();
        makers.into_iter().flat_map(|maker| maker.join().unwrap()).collect()
    });
    drop(server);
    let server = Server::start(&data, &[]);
    let api = server.api();
    for kept in all.iter_mut().chain(&mut others) {
        kept.answers(&api);
    }
    // Those of which nobody was told go too.
    for left in api.get("/v1/sandboxes").success()["sandboxes"].as_array().unwrap() {
        let id = left["id"].as_str().unwrap();
        if all.iter().all(|kept| kept.id != id) {
            kill(&api, id);
        }
    }
    server
}
