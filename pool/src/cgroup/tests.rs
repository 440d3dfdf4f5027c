use std::process::{Command, Stdio};

use super::*;

fn machine() -> MachineSpec {
    MachineSpec { memory_mib: 256, vcpus: 2, ..MachineSpec::default() }
}

/// A folder that looks like a group with these controllers. A real one fills itself with files.
fn pretend(controllers: &str, processes: &str, is_root: bool) -> tempfile::TempDir {
    let own = tempfile::tempdir().unwrap();
    fs::write(own.path().join("cgroup.controllers"), controllers).unwrap();
    fs::write(own.path().join("cgroup.procs"), processes).unwrap();
    if !is_root {
        fs::write(own.path().join("cgroup.type"), "domain\n").unwrap();
    }
    own
}

fn read(place: &Path, name: &str) -> String {
    fs::read_to_string(place.join(name)).unwrap()
}

#[test]
fn limits_are_written_where_the_kernel_looks_for_them() {
    let own = pretend("cpuset cpu io memory hugetlb pids\n", "1\n2\n", true);
    let (parent, has) = Groups::below(own.path(), 77).unwrap();
    let parent = parent.unwrap();
    assert_eq!(has, CONTROLLERS);
    for place in [own.path(), &parent] {
        assert_eq!(read(place, "cgroup.subtree_control"), "+memory +cpu +pids +io");
    }
    let disk = Some(DiskRate { device: "7:0".into(), bytes_per_second: 1000 });
    let groups = Groups { parent: Some(parent), has, disk, lacking: None };
    let group = groups.make(200_003, &Limits::of(&machine())).unwrap().unwrap();
    assert_eq!(group.procs(), own.path().join("stasis-77/vm-200003/cgroup.procs"));
    let expected = [
        ("memory.max", "335544320"),
        ("memory.oom.group", "1"),
        ("cpu.max", "300000 100000"),
        ("pids.max", "18"),
        ("io.max", "7:0 rbps=1000 wbps=1000"),
    ];
    for (name, value) in expected {
        assert_eq!(read(&group.place, name), value, "{name}");
    }
}

#[test]
fn what_is_lacking_is_left_out_and_told() {
    let own = pretend("pids hugetlb", "", true);
    let (parent, has) = Groups::below(own.path(), 78).unwrap();
    let groups = Groups { parent, has, disk: None, lacking: None };
    let group = groups.make(1, &Limits::of(&machine())).unwrap().unwrap();
    let files: Vec<_> = fs::read_dir(&group.place).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(files, ["pids.max"]);

    let none = pretend("hugetlb", "", true);
    assert_eq!(Groups::below(none.path(), 78).unwrap(), (None, vec![]));
    assert!(!none.path().join("stasis-78").exists());
}

#[test]
fn the_node_moves_out_of_the_way_but_nobody_else_does() {
    let own = pretend("pids", "79\n", false);
    Groups::below(own.path(), 79).unwrap();
    assert_eq!(read(&own.path().join("stasis-node"), "cgroup.procs"), "79");

    let shared = pretend("pids", "79\n80\n", false);
    let reason = Groups::below(shared.path(), 79).unwrap_err();
    assert!(reason.contains("1 other processes") && reason.contains("Delegate"), "{reason}");
}

#[test]
fn a_killed_nodes_groups_are_swept_and_a_living_ones_are_not() {
    let own = pretend("pids", "", true);
    let living = own.path().join(format!("stasis-{}/vm-5", std::process::id()));
    let dead = own.path().join("stasis-4294967294/vm-5");
    for place in [&living, &dead] {
        fs::create_dir_all(place).unwrap();
    }
    sweep(own.path());
    assert!(living.exists() && !dead.parent().unwrap().exists());
}

#[test]
fn a_killed_nodes_groups_go_with_the_last_vm_that_outlived_it() {
    let own = pretend("pids", "", true);
    let mut groups = Groups::none();
    groups.parent = Some(own.path().join("stasis-1"));
    let dead = own.path().join("stasis-4294967294");
    for vm in [dead.join("vm-5"), dead.join("vm-6"), own.path().join("stasis-1/vm-7")] {
        fs::create_dir_all(vm).unwrap();
    }
    // A process is in there, as long as a file is.
    fs::write(dead.join("vm-6/process"), "").unwrap();
    let (first, second) = (groups.adopt(&dead.join("vm-5")), groups.adopt(&dead.join("vm-6")));
    drop(first);
    assert!(!dead.join("vm-5").exists() && dead.join("vm-6").exists());
    fs::remove_file(dead.join("vm-6/process")).unwrap();
    drop(second);
    assert!(!dead.exists());
    // A node may have the process id of an earlier one, and with it the group.
    drop(groups.adopt(&own.path().join("stasis-1/vm-7")));
    assert!(own.path().join("stasis-1").exists());
}

/// On the kernel's own hierarchy. The whole of it, with a real node, is shown in the rig.
#[test]
fn the_kernel_takes_the_limits() {
    let groups = Groups::open(None);
    if let Some(reason) = groups.lacking() {
        eprintln!("SKIPPED: {reason}");
        return;
    }
    let group = groups.make(200_000, &Limits::of(&machine())).unwrap().unwrap();
    assert_eq!(read(&group.place, "memory.max").trim(), "335544320");
    assert_eq!(read(&group.place, "cpu.max").trim(), "300000 100000");
    assert_eq!(read(&group.place, "pids.max").trim(), "18");
    let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    fs::write(group.procs(), child.id().to_string()).unwrap();
    assert_eq!(read(&group.place, "cgroup.procs").trim(), child.id().to_string());
    child.kill().unwrap();
    child.wait().unwrap();
    let place = group.place.clone();
    drop(group);
    assert!(!place.exists());
}
