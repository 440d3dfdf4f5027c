//! Templates that are not what was published: refused, never booted.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use super::{Case, on_the_host, templates};
use crate::{
    cli::finish,
    fixtures,
    http::Api,
    server::Server,
    world::{World, eventually},
};

pub(super) fn cases() -> Vec<Case> {
    vec![
        on_the_host("a template whose files were altered or truncated is refused, others still answer", damaged),
        on_the_host("a template that is altered while it is in use gives no VM until it is built anew", damaged_in_use),
        on_the_host(
            "a template of another kind of host is refused by name, and built again from its disks",
            of_another_host,
        ),
    ]
}

/// What is done to which file, and what the refusal must say.
struct Damage {
    template: &'static str,
    file: &'static str,
    how: fn(&Path),
    refusal: &'static str,
}

const fn damage(template: &'static str, file: &'static str, how: fn(&Path), refusal: &'static str) -> Damage {
    Damage { template, file, how, refusal }
}

const DAMAGES: [Damage; 8] = [
    damage("memory-altered", "memory", flip_a_bit, "part memory was altered"),
    damage("memory-truncated", "memory", halve, "part memory has"),
    damage("memory-missing", "memory", remove, "is missing"),
    damage("state-altered", "state", flip_a_bit, "part state was altered"),
    damage("state-truncated", "state", halve, "part state has"),
    damage("disk-altered", "disk", flip_a_bit, "part disk was altered"),
    damage("manifest-altered", "manifest.json", flip_a_bit, "manifest"),
    damage("manifest-truncated", "manifest.json", halve, "manifest"),
];

fn damaged(world: &World) {
    let server = Server::start(&world.place("damaged"), &[]);
    build(&server.api(), "whole");
    let published = server.files().join("templates");
    for Damage { template, file, how, .. } in DAMAGES {
        let folder = published.join(template);
        let mut copy = Command::new("cp");
        let copied = finish(copy.args(["-a", "--reflink=always"]).arg(published.join("whole")).arg(&folder));
        assert_eq!(copied.code, 0, "{copied:?}");
        how(&version(&folder).join(file));
    }
    let data = server.data().to_owned();
    assert_eq!(server.stop(), Vec::<String>::new());

    let server = Server::start(&data, &[]);
    server.api().get("/invoke/whole/").success();
    let wrong: Vec<_> = DAMAGES.iter().filter_map(|damage| not_refused(&server, damage)).collect();
    server.api().get("/invoke/whole/").success();
    assert_eq!(wrong, Vec::<String>::new());
    assert_eq!(server.stop(), Vec::<String>::new());
}

fn build(api: &Api, name: &str) {
    templates::build(api, "/v1/templates", &fixtures::identity_as(name));
    api.get(&format!("/invoke/{name}/")).success();
}

/// What is wrong with the refusal.
fn not_refused(server: &Server, Damage { template, refusal, .. }: &Damage) -> Option<String> {
    let line = server.log.line("a template is refused; build it again", |fields| fields["template"] == *template);
    let answer = server.api().get(&format!("/invoke/{template}/"));
    let logged = line["reason"].as_str().is_some_and(|reason| reason.contains(refusal));
    let told = answer.status() == 503 && answer.text().contains(refusal);
    let code = || answer.json()["error"]["code"].clone();
    (!logged || !told).then(|| format!("{template}: {} {}, the log: {}", answer.status(), code(), line["reason"]))
}

/// VMs that were restored before may still answer; no new one is. Building it anew helps, as the refusal says.
fn damaged_in_use(world: &World) {
    build(&world.api, "struck");
    flip_a_bit(&version(&world.host().files().join("templates/struck")).join("memory"));
    let refused = eventually("a refusal", Duration::from_secs(60), || {
        let answer = world.api.get("/invoke/struck/");
        (answer.status() == 503).then_some(answer)
    });
    assert!(refused.text().contains("part memory was altered"), "{}", refused.text());
    build(&world.api, "struck");
    templates::remove(world, "struck");
}

/// The one version in a template's folder.
fn version(folder: &Path) -> PathBuf {
    let mut versions: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(versions.len(), 1, "{versions:?}");
    versions.remove(0)
}

fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn flip_a_bit(path: &Path) {
    let file = open(path);
    let middle = file.metadata().unwrap().len() / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, middle).unwrap();
    file.write_all_at(&[byte[0] ^ 1], middle).unwrap();
}

fn halve(path: &Path) {
    let file = open(path);
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
}

fn remove(path: &Path) {
    fs::remove_file(path).unwrap();
}

/// As if the data had come from a host whose CPU is another vendor's.
fn of_another_host(world: &World) {
    let server = Server::start(&world.place("moved"), &[]);
    build(&server.api(), "moved");
    let before = server.api().get("/v1/templates/moved").success();
    let folder = version(&server.files().join("templates/moved"));
    let data = server.data().to_owned();
    // The volume is there as long as its server.
    let made_elsewhere = pretend_another_vendor(&folder);
    fs::remove_dir_all(&folder).unwrap();
    fs::rename(made_elsewhere, &folder).unwrap();
    assert_eq!(server.stop(), Vec::<String>::new());

    let server = Server::start(&data, &[]);
    let api = server.api();
    let refusal = eventually("a word on what differs", Duration::from_secs(60), || {
        let pool = crate::world::pool(&api, "moved");
        pool["last_failure"].as_str().map(str::to_owned)
    });
    assert!(refusal.contains("CPU vendor was") && refusal.contains("is being built again"), "{refusal}");
    assert_eq!(api.get("/invoke/moved/").status(), 503, "until then nothing is tried");
    let built_again = "a template of another kind of host was built again";
    server.log.line_within(Duration::from_secs(400), built_again, |fields| fields["template"] == "moved");
    api.get("/invoke/moved/").success();
    let after = api.get("/v1/templates/moved").success();
    assert_eq!(after["digest"], before["digest"]);
    assert_ne!(after["kernel_boot_id"], before["kernel_boot_id"], "it was booted again");
    let versions = fs::read_dir(server.files().join("templates/moved")).unwrap().count();
    assert_eq!(versions, 1, "the earlier version is gone");
    assert_eq!(server.stop(), Vec::<String>::new());
}

/// A copy of a published template that says it was made on a CPU of another vendor, properly sealed. Returns where it is.
fn pretend_another_vendor(folder: &Path) -> PathBuf {
    let snapshot = stasis_cow::Snapshot::open(folder).unwrap();
    let home = folder.parent().unwrap();
    let staging = stasis_cow::Staging::new(home).unwrap();
    for name in snapshot.manifest().parts.keys() {
        let copied =
            finish(Command::new("cp").args(["-a", "--reflink=always"]).arg(folder.join(name)).arg(staging.path(name)));
        assert_eq!(copied.code, 0, "{copied:?}");
    }
    let mut state = fs::read(folder.join("state")).unwrap();
    let vendor: &[u8] = [&b"AuthenticAMD"[..], b"GenuineIntel"]
        .into_iter()
        .find(|vendor| state.windows(vendor.len()).any(|window| window == *vendor))
        .unwrap();
    let at = state.windows(vendor.len()).position(|window| window == vendor).unwrap();
    state[at..at + vendor.len()].copy_from_slice(b"StasisStasis");
    let path = staging.path("state");
    fs::remove_file(&path).unwrap();
    fs::write(&path, state).unwrap();
    let place = home.join("made-elsewhere");
    staging.publish(&place, snapshot.manifest().details.clone(), snapshot.manifest().created_at).unwrap();
    place
}
