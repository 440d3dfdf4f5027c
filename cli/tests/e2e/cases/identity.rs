//! Every invocation has a VM of its own, which is not the template.

use std::{collections::HashSet, sync::Mutex, thread};

use serde_json::{Value, json};

use super::{Case, on_the_host, over_http, templates};
use crate::{fixtures, world::World};

/// What no two VMs may share.
const OWN: [&str; 6] = ["boot_nonce", "boot_id", "machine_id", "hostname", "random", "uuid4"];

pub(super) fn cases() -> Vec<Case> {
    vec![
        over_http("VMs share what was computed before the snapshot and nothing that names them", shared_and_own),
        over_http("fifty invocations, eight at a time, meet fifty VMs", many),
        over_http("nothing of an invocation is left for the next", forgotten),
        over_http(
            "a template of two vCPUs and every device has them after each restore and rewind, or is refused",
            two_vcpus,
        ),
        on_the_host("a VM proves that it is the template's kernel, repaired", proved),
    ]
}

fn shared_and_own(world: &World) {
    let template = world.api.get("/v1/templates/identity").success();
    let kernel = template["kernel_boot_id"].as_str().unwrap();
    let vms: Vec<_> = (0..3).map(|_| world.api.get("/invoke/identity/").success()).collect();
    for vm in &vms {
        assert_eq!(vm["value"], vms[0]["value"], "computed at import: the snapshot's");
        assert_eq!(vm["counter"], 1, "it starts afresh");
        assert_eq!(vm["uid"], 1000, "the start command runs as `user`");
        assert_eq!(vm["pid"], vms[0]["pid"], "the same process, restored");
        assert_ne!(vm["boot_id"], kernel, "the template's boot id is not shown");
        assert_eq!(vm["boot_id"], vm["boot_nonce"]);
        assert_eq!(vm["machine_id"].as_str().unwrap().len(), 32);
    }
    for field in OWN {
        assert_eq!(distinct(&vms, field), vms.len(), "{field} is shared: {vms:#?}");
    }
}

fn forgotten(world: &World) {
    for life in 0..12 {
        let told = world.api.get(&format!("/invoke/identity/remember/token{life}")).success();
        assert_eq!(told["before"], serde_json::json!([]), "life {life}");
        assert_eq!(told["now"], 5, "it could leave them: memory, disk, two tmpfs, a process");
    }
    let metrics = world.api.get("/metrics").text().to_owned();
    let rewinds = "stasis_pool_rewinds_total{template=\"identity\",result=\"ready\"}";
    let count = metrics.lines().find_map(|line| line.strip_prefix(rewinds)).map(|count| count.trim().parse::<u64>());
    assert!(matches!(count, Some(Ok(1..))), "VMs are rewound, not only replaced: {count:?}");
}

fn two_vcpus(world: &World) {
    let tar = ("Content-Type", "application/x-tar");
    let built = world.api.call("POST", "/v1/templates", &[tar], &fixtures::identity_of_two("two"));
    // The `emulated` kernel, which only the direct lane has, knows one.
    if world.server.is_some() && built.status() == 400 {
        return assert!(built.text().contains("cpu"), "{}", built.text());
    }
    let told = built.text();
    assert!(built.status() == 200 && !told.contains("\"failed\""), "{told}");
    for life in 0..4 {
        let identity = world.api.get("/invoke/two/").success();
        assert_eq!((&identity["cpus"], &identity["counter"]), (&2.into(), &1.into()), "life {life}");
    }
    let devices = world.api.get("/invoke/two/devices").success();
    // Two disks, vsock, rng, balloon: the ids of the virtio specification, 5.
    assert_eq!(devices["ids"], json!([2, 2, 19, 4, 5]), "{devices}");
    assert!(devices["rng"].as_str().is_some_and(|name| name.starts_with("virtio_rng")), "{devices}");
    templates::remove(world, "two");
}

fn many(world: &World) {
    let count = 50;
    let (left, met) = (Mutex::new(count), Mutex::new(Vec::new()));
    let next = || {
        let mut left = left.lock().unwrap();
        *left = usize::checked_sub(*left, 1)?;
        Some(())
    };
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while next().is_some() {
                    let answer = world.api.get("/invoke/identity/");
                    let mut identity = answer.success();
                    identity["vm"] = answer.header("x-stasis-vm").into();
                    met.lock().unwrap().push(identity);
                }
            });
        }
    });
    let met = met.into_inner().unwrap();
    assert_eq!(met.len(), count);
    for field in OWN.into_iter().chain(["vm"]) {
        assert_eq!(distinct(&met, field), count, "{field} is shared");
    }
    assert!(met.iter().all(|vm| vm["counter"] == 1), "a VM served twice");
}

fn proved(world: &World) {
    // Not in the midst of something: its restored VMs would do that first.
    world.host().log.line("its guest rests", |fields| fields["template"] == "identity");
    let template = world.api.get("/v1/templates/identity").success();
    let answer = world.api.get("/invoke/identity/");
    let identity = answer.success();
    let vm = answer.header("x-stasis-vm");
    let line = world.host().log.line("awake", |fields| fields["vm"] == vm);
    let certificate = line["certificate"].as_str().unwrap();
    for (field, expected) in [
        ("kernel_boot_id", &template["kernel_boot_id"]),
        ("boot_nonce", &identity["boot_nonce"]),
        ("hostname", &identity["hostname"]),
        ("machine_id", &identity["machine_id"]),
    ] {
        let expected = format!("{field}: {expected}");
        assert!(certificate.contains(&expected), "no {expected} in {certificate}");
    }
}

fn distinct(vms: &[Value], field: &str) -> usize {
    vms.iter().map(|vm| vm[field].to_string()).collect::<HashSet<_>>().len()
}
