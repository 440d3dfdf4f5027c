//! `stasis up` where it cannot be: one line, which says what to do.

use std::{
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
};

use super::{Case, on_the_host};
use crate::{
    cli::{Finished, finish},
    host, lane, server,
    world::World,
};

pub(super) fn cases() -> Vec<Case> {
    vec![
        on_the_host("a port that is taken is told in one line", port_taken),
        on_the_host("a data directory that is in use is told in one line", data_in_use),
        on_the_host("a missing /dev/kvm is told in one line", no_kvm),
        on_the_host("a user who is not root is told in one line", not_root),
        on_the_host("a kernel or base that is not there is told in one line", no_assets),
        on_the_host("a server that fails to start leaves nothing mounted", fails_late),
        on_the_host("an address beyond loopback is refused unless it is meant", remote),
        on_the_host("`stasis doctor` fails where /dev/kvm is missing", doctor_without_kvm),
    ]
}

fn up(data: &Path, arguments: &[&str]) -> Finished {
    finish(server::up(data, arguments).stdin(Stdio::null()))
}

fn says(finished: &Finished, hints: &[&str]) {
    let line = finished.refusal();
    for hint in hints {
        assert!(line.contains(hint), "{hint:?} is missing in {line:?}");
    }
}

fn port_taken(world: &World) {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let data = world.place("port-taken");
    says(&up(&data, &["--listen", &address]), &["cannot listen on", &address, "--listen takes another address"]);
    assert!(!data.join("data").exists(), "it began its work before it had the port");
}

fn data_in_use(world: &World) {
    let data = world.host().data();
    says(&up(data, &[]), &["a stasis runs in", data.to_str().unwrap(), "`make down` stops it"]);
    world.api.get("/invoke/wordcount/healthz");
}

/// In a mount namespace whose /dev is empty.
fn without_kvm(command: &str, data: &Path) -> Finished {
    const SCRIPT: &str = r#"mount -t tmpfs none /dev && exec "$0" "$@""#;
    let mut unshared = Command::new("unshare");
    unshared.args(["--mount", "sh", "-c", SCRIPT]).arg(lane::binary()).arg(command).env("STASIS_DATA", data);
    finish(unshared.stdin(Stdio::null()))
}

fn no_kvm(world: &World) {
    says(&without_kvm("up", &world.place("no-kvm")), &["/dev/kvm cannot be opened", "load the kvm modules"]);
    assert!(!world.place("no-kvm").exists());
}

fn doctor_without_kvm(world: &World) {
    let told = without_kvm("doctor", &world.place("no-kvm"));
    assert_eq!(told.code, 1, "{told:?}");
    assert!(told.stdout.lines().any(|line| line.starts_with("MISSING  kvm")), "{}", told.stdout);
}

fn not_root(world: &World) {
    // Where nobody may enter the folder of the binary: another way to it.
    let binary = tempfile::Builder::new().prefix("stasis-e2e-").tempdir_in("/tmp").unwrap();
    let copy = binary.path().join("stasis");
    std::fs::copy(lane::binary(), &copy).unwrap();
    let opened = finish(Command::new("chmod").args(["-R", "a+rX"]).arg(binary.path()));
    assert_eq!(opened.code, 0, "{opened:?}");
    let mut nobody = Command::new("setpriv");
    nobody.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]).arg(copy).arg("up");
    says(&finish(nobody.env("STASIS_DATA", world.place("nobody"))), &["must run as root"]);
}

fn no_assets(world: &World) {
    let data = world.place("no-assets");
    says(&up(&data, &["--kernel", "/no/vmlinux"]), &["the guest kernel /no/vmlinux", "`make up` builds it"]);
    says(&up(&data, &["--base", "debian=/no/base"]), &["the base image /no/base", "`make up` builds it"]);
    says(&up(&data, &["--base", "debian"]), &["is not NAME=FILE"]);
    assert!(!data.exists(), "it began its work before it had looked at its arguments");
}

/// A base that opens and cannot be read is noticed late.
fn fails_late(world: &World) {
    let data = world.place("fails-late");
    let failed = up(&data, &["--base", "debian=/"]);
    assert_eq!(failed.code, 1, "{failed:?}");
    assert!(failed.stderr.lines().last().unwrap().contains("the base image \"/\" cannot be read"), "{failed:?}");
    assert_eq!(host::leftovers(&data), Vec::<String>::new());
}

fn remote(world: &World) {
    says(&up(&world.place("remote"), &["--listen", "0.0.0.0:0"]), &["not a loopback address", "--allow-remote"]);
}
