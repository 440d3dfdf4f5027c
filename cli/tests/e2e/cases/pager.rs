//! Templates whose memory is compressed: a pager fills their VMs' memory.

use std::{
    fs,
    hash::{BuildHasher, RandomState},
    sync::mpsc,
    thread,
    time::Duration,
};

use rustix::process::Signal;

use super::{Case, on_the_host, templates};
use crate::{
    fixtures,
    host::Process,
    http::Api,
    server::Server,
    world::{World, eventually},
};

/// Longest time for the VMs of a dead pager to end, and to be replaced, on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

pub(super) fn cases() -> Vec<Case> {
    vec![on_the_host(
        "VMs of compressed memory answer as their snapshot has it, end with their pager, and are replaced",
        paged,
    )]
}

/// How many processes are killed at random.
const KILLS: u32 = 12;

fn random() -> u64 {
    RandomState::new().hash_one(0) >> 1
}

/// Sooner or later; of a VM that nobody used before.
fn answers(api: &Api) {
    eventually("an answer of another VM", LIMIT, || {
        let answer = api.get("/invoke/paged/");
        (answer.status() == 200).then(|| assert_eq!(answer.json()["counter"], 1))
    });
}

fn paged(world: &World) {
    let server = Server::start(&world.place("paged"), &[]);
    let api = &server.api();
    templates::build(api, "/v1/templates", &fixtures::identity_compressed("paged"));
    for _ in 0..4 {
        assert_eq!(api.get("/invoke/paged/").success()["counter"], 1);
    }
    let of_role = |role: &str| {
        let of = |process: &Process| fs::read_to_string(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default();
        server.vms().into_iter().filter(|process| of(process).contains(&format!("\0{role}\0"))).collect::<Vec<_>>()
    };
    let vms = eventually("a VM that stands ready", LIMIT, || Some(of_role("vmm")).filter(|vms| !vms.is_empty()));
    let pagers = of_role("pager");
    let [pager] = &pagers[..] else { panic!("{pagers:?}") };
    let files = server.files().join("templates/paged");
    let kept: Vec<_> = fs::read_dir(files).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(kept.iter().any(|path| path.join("memory.frames").exists() && !path.join("memory").exists()), "{kept:?}");

    pager.signal(Signal::KILL);
    for vm in &vms {
        assert!(vm.ends_within(LIMIT), "VM process {} outlives its pager", vm.pid);
    }
    answers(api);
    assert_eq!(of_role("pager").len(), 1);

    // And at any moment, while others are claimed and restored.
    for round in 0..KILLS {
        let (answered, first) = mpsc::channel();
        thread::scope(|scope| {
            for _ in 0..2 {
                let answered = answered.clone();
                scope.spawn(move || {
                    let status = api.get("/invoke/paged/").status();
                    assert!([200, 429, 502, 503].contains(&status), "{status}");
                    answered.send(())
                });
            }
            // Before the first answer, or right behind it.
            let _ = first.recv_timeout(Duration::from_millis(random() % 1000));
            let role = if round % 3 == 0 { "pager" } else { "vmm" };
            let processes = of_role(role);
            if !processes.is_empty() {
                processes[usize::try_from(random()).unwrap() % processes.len()].signal(Signal::KILL);
            }
        });
        answers(api);
    }
    assert_eq!(server.stop(), Vec::<String>::new());
}
