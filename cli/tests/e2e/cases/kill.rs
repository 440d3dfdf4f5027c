//! A server that is killed.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use super::{Case, on_the_host, templates};
use crate::{
    cli::finish,
    fixtures, host, lane,
    server::Server,
    world::{World, eventually, pool},
};

/// How long a VM may take to notice that nobody holds it any more.
const ORPHANED: Duration = Duration::from_secs(30);

pub(super) fn cases() -> Vec<Case> {
    vec![
        on_the_host("after kill -9 the VMs end, and the next start takes over what was left", killed),
        on_the_host("`stasis down` removes what a killed server left mounted", down),
    ]
}

fn kept(world: &World, name: &str) -> Server {
    let server = Server::start(&world.place(name), &[]);
    templates::build(&server.api(), "/v1/templates", &fixtures::identity_as("kept"));
    server
}

/// Kills it while two requests run, a build is under way, and a VM stands ready.
fn kill_at_work(server: &Server) {
    let api = server.api();
    let mut streaming = api.begin("GET", "/invoke/kept/drip?n=2&pause=600", &[]).unwrap();
    assert_eq!(streaming.head().unwrap().status, 200);
    let waiting = api.begin("GET", "/invoke/kept/sleep/50", &[]).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let archive = fixtures::identity_as("unfinished");
            let _ = api.try_call("POST", "/v1/templates", &[("Content-Type", "application/x-tar")], &archive);
        });
        let working = || {
            let pool = pool(&api, "kept");
            let staged = server.files().join("templates/unfinished").exists();
            (pool["claimed"] == 2 && pool["ready"] == 1 && staged && server.vms().len() >= 4).then_some(())
        };
        eventually("two claimed VMs, one ready and one that is being built", Duration::from_secs(90), working);
        let vms = server.kill();
        assert!(vms.len() >= 4, "{vms:?}");
        for vm in &vms {
            assert!(vm.ends_within(ORPHANED), "VM process {} outlives its server", vm.pid);
        }
    });
    assert!(streaming.chunk().and_then(|_| streaming.chunk()).is_err());
    drop(waiting);
}

fn killed(world: &World) {
    let server = kept(world, "killed");
    kill_at_work(&server);
    let data = server.data().to_owned();
    drop(server);
    fs::write(data.join("data/uploads/half-an-upload"), "x").unwrap();

    let server = Server::start(&data, &[]);
    let identity = server.api().get("/invoke/kept/").success();
    assert_eq!(identity["counter"], 1);
    assert_eq!(entries(&server.files().join("uploads")), Vec::<String>::new(), "half uploads are removed");
    assert_eq!(server.api().get("/v1/templates/unfinished").status(), 404);
    let of_templates = entries(&server.files().join("templates/unfinished"));
    assert!(of_templates.is_empty(), "half a template is left: {of_templates:?}");
    let path = data.to_str().unwrap();
    assert!(host::mounts(path).len() <= 1, "{:?}", host::mounts(path));
    assert!(host::loop_devices(path).len() <= 1, "{:?}", host::loop_devices(path));
    assert_eq!(server.stop(), Vec::<String>::new());
}

fn down(world: &World) {
    let data = world.place("downed");
    let server = Server::start(&data, &[]);
    server.kill();
    drop(server);
    assert_eq!(host::mounts(data.to_str().unwrap()).len(), 1, "a killed server cannot unmount");
    let down = || finish(Command::new(lane::binary()).args(["down", "--data"]).arg(&data).stdin(Stdio::null()));
    let told = down();
    assert_eq!(told.code, 0, "{told:?}");
    assert!(told.stdout.contains("what a killed stasis had left mounted is removed"), "{told:?}");
    assert_eq!(host::leftovers(&data), Vec::<String>::new());
    let again = down();
    assert_eq!(again.code, 0, "{again:?}");
    assert!(again.stdout.contains("nothing runs"), "{again:?}");
}

fn entries(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
