//! Templates that do not become ready, or for which there is no room.

use std::{fs, process::Command};

use serde_json::Value;

use super::{Case, on_the_host, over_http};
use crate::{cli::Finished, fixtures, server::Server, world::World};

pub(super) fn cases() -> Vec<Case> {
    vec![
        over_http("a start command that exits fails the build with its output and the console", exits),
        over_http("a start command that never listens fails the build at its deadline", never_listens),
        over_http("a template.toml that is wrong is refused before it is sent", wrong_spec),
        on_the_host("a base without an agent fails the build with the kernel's last words", no_agent),
        on_the_host("a node without the memory or the disk refuses a build with the numbers", no_room),
    ]
}

fn build(world: &World, name: &str, spec: &str) -> Finished {
    let folder = fixtures::folder(&world.place(name), spec);
    let built = world.stasis.run(["template", "build", folder.to_str().unwrap()]);
    assert_eq!(built.code, 1, "{built:?}");
    assert_eq!(world.api.get(&format!("/v1/templates/{name}")).status(), 404);
    built
}

fn tells(built: &Finished, texts: &[&str]) {
    for text in texts {
        assert!(built.stderr.contains(text), "{text:?} is missing in\n{}", built.stderr);
    }
}

const OUTPUT: &str = "--- what the command printed ---";
const CONSOLE: &str = "--- the console's end ---";

fn exits(world: &World) {
    let spec = "name = 'exits'\nmemory = '128MiB'\ncommand = 'echo where is my configuration; exit 7'\n";
    let built = build(world, "exits", spec);
    tells(&built, &["the start command exited with status 7", OUTPUT, "\nwhere is my configuration\n", CONSOLE]);
}

fn never_listens(world: &World) {
    let spec = "name = 'deaf'\nmemory = '128MiB'\nready_timeout = '20s'\ncommand = 'echo I listen to nobody; exec sleep 1000'\n";
    let built = build(world, "deaf", spec);
    tells(&built, &["nothing listened on port 8080 within 20s", OUTPUT, "\nI listen to nobody\n", CONSOLE]);
}

fn no_agent(world: &World) {
    let image = world.place("bare.ext4");
    fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
    assert!(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image).status().unwrap().success());
    let server = Server::start(&world.place("bare"), &["--base", &format!("bare={}", image.display())]);
    let spec = "name = 'bare'\nbase = 'bare'\nmemory = '128MiB'\ncommand = 'x'\n";
    let folder = fixtures::folder(&world.place("bare-template"), spec);
    let built = server.stasis().run(["template", "build", folder.to_str().unwrap()]);
    assert_eq!(built.code, 1, "{built:?}");
    let (_, console) = built.stderr.split_once(CONSOLE).unwrap_or_default();
    assert!(console.contains("Kernel panic"), "{}", built.stderr);
    assert_eq!(server.stop(), Vec::<String>::new());
}

fn wrong_spec(world: &World) {
    let folder = fixtures::folder(&world.place("wrong"), "name = 'wrong'\ncommand = 'x'\nport = 0\n");
    let built = world.stasis.run(["template", "build", folder.to_str().unwrap()]);
    assert!(built.refusal().contains("port is 0, but must be 1 to 65535"), "{built:?}");
}

fn no_room(world: &World) {
    let server = Server::start(&world.place("small"), &["--memory", "100MiB", "--disk", "3GiB"]);
    let built = server.stasis().run(["template", "build", fixtures::example("identity").to_str().unwrap()]);
    // 128 MiB, and what a VM costs beside its guest's memory.
    let numbers = format!("not enough memory: {} bytes needed, {} bytes available", 136 << 20, 100 << 20);
    assert!(built.refusal().contains(&numbers), "{built:?}");

    let large = b"name = 'large'\nmemory = '3GiB'\ncommand = 'x'\n";
    let archive = fixtures::archive(&[("template.toml", large)]);
    let answer = server.api().call("POST", "/v1/templates", &[("Content-Type", "application/x-tar")], &archive);
    assert_eq!(answer.status(), 507, "{}", answer.text());
    let error = answer.json()["error"].clone();
    let bytes = |field: &str| error[field].as_u64().unwrap();
    assert_eq!((&error["code"], &error["resource"]), (&Value::from("no_capacity"), &Value::from("disk")), "{error}");
    assert!(bytes("needed") > 3 << 30 && bytes("available") < 3 << 30, "{error}");

    assert!(server.vms().is_empty(), "a VM was started");
    assert_eq!(fs::read_dir(server.files().join("templates")).unwrap().count(), 0, "something was staged");
    assert_eq!(fs::read_dir(server.files().join("uploads")).unwrap().count(), 0, "an upload was kept");
    assert_eq!(server.stop(), Vec::<String>::new());
}
