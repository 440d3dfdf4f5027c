//! The jail around every VM's process. What it holds against is in `vmm/tests/jail`; here, that a running server uses it.

use std::{collections::BTreeSet, fs};

use super::{Case, on_the_host};
use crate::world::World;

pub(super) fn cases() -> Vec<Case> {
    vec![on_the_host("every VM's process is jailed, each with a uid of its own", jailed)]
}

fn jailed(world: &World) {
    // One that has run, and those that stand ready.
    world.api.get("/invoke/identity/").success();
    let mut uids = BTreeSet::new();
    let mut looked_at = 0;
    for vm in world.host().vms() {
        let of = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", vm.pid));
        // Other cases' VMs come and go; one is in the jail once it is no longer root.
        let (Ok(status), Ok(environment), Ok(root)) =
            (of("status"), of("environ"), fs::read_dir(format!("/proc/{}/root", vm.pid)))
        else {
            continue;
        };
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.unwrap_or_default().trim().to_owned()
        };
        let uid = field("Uid").split('\t').next().unwrap_or_default().to_owned();
        if uid == "0" || field("State").starts_with(['Z', 'X']) || field("Seccomp") != "2" {
            continue;
        }
        assert_eq!((field("CapEff"), field("CapBnd")), ("0000000000000000".into(), "0000000000000000".into()));
        assert_eq!((field("NoNewPrivs"), field("Groups")), ("1".into(), String::new()));
        assert!(field("NSpid").ends_with("\t1"), "{status}");
        assert_eq!(root.count(), 0, "its root has files");
        assert!(environment.split('\0').all(|name| name.is_empty() || name.starts_with("STASIS_LOG")), "{environment}");
        assert!(uids.insert(uid.clone()), "two VMs have uid {uid}");
        looked_at += 1;
    }
    assert!(looked_at > 0, "no VM's process was there to be looked at");
}
