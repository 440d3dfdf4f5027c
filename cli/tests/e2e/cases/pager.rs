//! Templates whose memory is compressed: a pager fills their VMs' memory.

use std::{fs, time::Duration};

use rustix::process::Signal;

use super::{Case, on_the_host, templates};
use crate::{
    fixtures,
    host::Process,
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

fn paged(world: &World) {
    let server = Server::start(&world.place("paged"), &[]);
    let api = server.api();
    templates::build(&api, "/v1/templates", &fixtures::identity_compressed("paged"));
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
    eventually("an answer of another VM", LIMIT, || {
        let answer = api.get("/invoke/paged/");
        (answer.status() == 200).then(|| assert_eq!(answer.json()["counter"], 1))
    });
    assert_eq!(of_role("pager").len(), 1);
    assert_eq!(server.stop(), Vec::<String>::new());
}
