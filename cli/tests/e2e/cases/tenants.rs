//! Tenants, their pools, and hot VMs.

use std::{collections::HashSet, time::Duration};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::{Case, on_the_host};
use crate::{
    fixtures,
    http::{Answer, Api},
    server::Server,
    world::{World, eventually},
};

const A: &str = "key-of-tenant-a-0123456789abcdef0";
const B: &str = "key-of-tenant-b-0123456789abcdef0";
/// How long a restore or a repair may take on a loaded machine.
const SOON: Duration = Duration::from_secs(60);

pub(super) fn cases() -> Vec<Case> {
    vec![on_the_host("two tenants have pools and sandboxes of their own, and one of them hot VMs", two_tenants)]
}

fn ask(api: &Api, key: &str, method: &str, target: &str, body: &[u8]) -> Answer {
    api.call(method, target, &[("X-API-Key", key), ("Content-Type", "application/x-tar")], body)
}

/// One invocation: who answered, how it was come by, and which VM that was.
fn invoke(api: &Api, key: &str) -> (Value, String, String) {
    let answer = ask(api, key, "GET", "/invoke/shared/", b"");
    (answer.success(), answer.header("x-stasis-start").to_owned(), answer.header("x-stasis-vm").to_owned())
}

fn pool(api: &Api, key: &str) -> Value {
    ask(api, key, "GET", "/v1/pools/shared", b"").success()
}

fn until_hot(api: &Api, key: &str) -> Value {
    let hot = || Some(pool(api, key)).filter(|pool| pool["hot"] == 1 && pool["warming"] == 0);
    eventually("a hot VM", SOON, hot)
}

fn two_tenants(world: &World) {
    let file = format!("[[tenant]]\nname = \"a\"\nkey = \"{A}\"\n[[tenant]]\nname = \"b\"\nkey = \"{B}\"\n");
    let tenants = world.file("tenants.toml", file);
    let server = Server::start(&world.place("tenants"), &["--tenants", tenants.to_str().unwrap()]);
    let api = server.api();
    let built = ask(&api, A, "POST", "/v1/templates", &fixtures::identity_as("shared"));
    assert!(built.text().lines().last().unwrap().contains("\"event\":\"built\""), "{}", built.text());
    assert_eq!(api.get("/invoke/shared/").status(), 401);
    // The build's own is gone, and nobody has asked for another.
    eventually("no VM", SOON, || server.vms().is_empty().then_some(()));

    let set = json!({ "min": 1, "hot": 1, "max": 4 }).to_string();
    ask(&api, A, "PATCH", "/v1/pools/shared", set.as_bytes()).success();
    until_hot(&api, A);
    let mut seen = HashSet::new();
    for _ in 0..3 {
        let (vm, start, id) = invoke(&api, A);
        assert_eq!((start.as_str(), &vm["counter"]), ("hot", &json!(1)), "{vm}");
        for own in ["machine_id", "random", "boot_nonce"] {
            assert!(seen.insert(vm[own].to_string()), "{own} was seen before: {vm}");
        }
        assert!(seen.insert(id), "a life has served twice");
        until_hot(&api, A);
    }

    // A hot VM that ends is missed, though nobody asks for it.
    server.vms().iter().for_each(|vm| vm.signal(Signal::KILL));
    eventually("a failure that is told", SOON, || pool(&api, A)["last_failure"].as_str().map(str::to_owned));
    until_hot(&api, A);

    // The other has none of its VMs, and its own way.
    assert_eq!(pool(&api, B)["settings"]["hot"], 0);
    let (vm, start, id) = invoke(&api, B);
    assert_eq!(start, "cold", "{vm}");
    assert!(seen.insert(id));
    until_hot(&api, A);
    let listed = ask(&api, B, "GET", "/v1/pools", b"").success();
    let of: Vec<_> = listed["pools"].as_array().unwrap().iter().map(|pool| pool["tenant"].clone()).collect();
    assert_eq!(of, ["b"]);

    let new = json!({ "template": "shared", "timeout": "1h", "idle": "0s" }).to_string();
    let made = ask(&api, A, "POST", "/v1/sandboxes", new.as_bytes());
    assert_eq!(made.status(), 201, "{}", made.text());
    let id = made.json()["id"].as_str().unwrap().to_owned();
    for (key, shown) in [(A, 200), (B, 404)] {
        assert_eq!(ask(&api, key, "GET", &format!("/v1/sandboxes/{id}"), b"").status(), shown);
        assert_eq!(ask(&api, key, "GET", &format!("/sandbox/{id}/"), b"").status(), shown);
    }
    assert_eq!(ask(&api, B, "DELETE", &format!("/v1/sandboxes/{id}"), b"").status(), 404);
    assert_eq!(ask(&api, A, "DELETE", &format!("/v1/sandboxes/{id}"), b"").status(), 204);

    let listed = server.stasis().run(["--api-key", A, "pool", "list", "--json"]);
    assert_eq!(listed.code, 0, "{listed:?}");
    let listed: Value = serde_json::from_str(&listed.stdout).unwrap();
    assert_eq!((&listed["pools"][0]["tenant"], &listed["pools"][0]["settings"]["hot"]), (&json!("a"), &json!(1)));
    assert_eq!(server.stop(), Vec::<String>::new());
    assert!(!server.log.tail().contains(A), "a key is in the log");

    // What was set is there again, and the pool that it is for.
    let server = Server::start(&world.place("tenants"), &["--tenants", tenants.to_str().unwrap()]);
    until_hot(&server.api(), A);
    assert_eq!(server.stop(), Vec::<String>::new());
}
