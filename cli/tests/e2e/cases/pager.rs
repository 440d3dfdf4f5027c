//! Templates whose memory is compressed: a pager fills their VMs' memory.

use std::{fs, time::Duration};

use rustix::process::Signal;

use super::{Case, on_the_host, over_http, templates};
use crate::{
    fixtures,
    host::Process,
    server::Server,
    world::{World, eventually},
};

/// Longest time for the VMs of a dead pager to end, and to be replaced, on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

pub(super) fn cases() -> Vec<Case> {
    vec![
        over_http("a template whose memory is compressed answers, each time as its snapshot has it", |world| {
            templates::build(&world.api, "/v1/templates", &fixtures::identity_compressed("compressed"));
            for _ in 0..4 {
                assert_eq!(world.api.get("/invoke/compressed/").success()["counter"], 1);
            }
            templates::remove(world, "compressed");
        }),
        on_the_host("a pager that is killed ends its VMs, and others take their place", killed),
    ]
}

fn killed(world: &World) {
    let server = Server::start(&world.place("paged"), &[]);
    let api = server.api();
    templates::build(&api, "/v1/templates", &fixtures::identity_compressed("paged"));
    api.get("/invoke/paged/").success();
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
