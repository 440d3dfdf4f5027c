//! The limits of control groups bite: programs in a VMM process's place that take more than they may. For hosts whose control groups
//! version 2 have the controllers, as the rig's.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use super::*;
use crate::cgroup::{DiskRate, Limits};

/// Groups for VMs; none, and a word about it, where this host cannot limit.
fn groups(disk: Option<DiskRate>) -> Option<Groups> {
    let groups = Groups::open(disk);
    if let Some(reason) = groups.lacking() {
        eprintln!("SKIPPED: {reason}");
        return None;
    }
    Some(groups)
}

/// Where this process's groups for VMs are; the kernel counts there what happened in all of them, those that are gone included.
fn parent() -> PathBuf {
    Path::new("/sys/fs/cgroup").join(format!("stasis-{}", std::process::id()))
}

/// The number behind `key` in a file of `name: value` lines.
fn counted(place: &Path, file: &str, key: &str) -> u64 {
    let text = fs::read_to_string(place.join(file)).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {key} in {file}: {text}")).parse().unwrap()
}

/// A program in a VMM's place that waits for its first request, as a VMM does, and then does this, to its end. The groups' parent stays as
/// long as what is returned.
async fn run(script: &str, groups: Groups) -> Spawner {
    let program = Mute::new();
    let wait = "dd bs=64k count=1 of=/dev/null status=none";
    assert_eq!(stasis_vmm_api::CONTROL_FD, 0, "the script waits at the control socket");
    fs::write(&program.program, format!("#!/bin/sh\n{wait}\n{script}\n")).unwrap();
    let spawner =
        Spawner::start(&program.program, vec![("PATH".into(), "/usr/bin:/bin".into())], 7000, groups).unwrap();
    let admission = Admission::new(1 << 30);
    let (vmm, _) = Vmm::spawn(&spawner, &MACHINE, admission.reserve(1).unwrap()).await.unwrap();
    let group = fs::read_to_string(format!("/proc/{}/cgroup", vmm.pid())).unwrap();
    assert!(group.contains(&format!("/stasis-{}/vm-7000", std::process::id())), "{group}");
    drop(vmm.start(Request::Console, Vec::new()).await.unwrap());
    let limit = Duration::from_secs(60);
    tokio::time::timeout(limit, vmm.ended())
        .await
        .unwrap_or_else(|_| panic!("not at its end within {limit:?}: {script}"));
    drop(vmm);
    admission.all_returned().await;
    spawner
}

#[tokio::test]
async fn one_that_takes_too_much_memory_is_killed_with_all_that_it_started() {
    let Some(groups) = groups(None) else { return };
    // The machine's 1 MiB and 64 more are allowed; `tail` keeps 200.
    let script = "head -c 200M /dev/zero | tail -c 200M >/dev/null; exec sleep 1000";
    let spawner = run(script, groups).await;
    assert_eq!(counted(&parent(), "memory.events", "oom_group_kill"), 1);
    drop(spawner);
}

#[tokio::test]
async fn one_that_starts_too_many_tasks_cannot() {
    let Some(groups) = groups(None) else { return };
    // 17 are allowed. A shell that cannot fork ends, and with it, the first of its pid namespace, the others.
    let spawner = run("for i in $(seq 40); do sleep 1000 & done; exec sleep 1000", groups).await;
    assert!(counted(&parent(), "pids.events", "max") > 0);
    drop(spawner);
}

#[tokio::test]
async fn one_that_computes_is_held_to_its_share() {
    let Some(groups) = groups(None) else { return };
    let limits = Limits { cpu_us: 20_000, ..Limits::of(&MACHINE) };
    let group = groups.make(7001, &limits).unwrap().unwrap();
    let place = parent().join("vm-7001");
    let script = "read go; i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done";
    let mut child = Command::new("sh").args(["-c", script]).stdin(std::process::Stdio::piped()).spawn().unwrap();
    fs::write(group.procs(), child.id().to_string()).unwrap();
    drop(child.stdin.take());
    child.wait().unwrap();
    assert!(counted(&place, "cpu.stat", "nr_throttled") > 0);
    drop(group);
}

#[tokio::test]
async fn one_that_writes_is_held_to_its_rate() {
    let folder = tempfile::tempdir().unwrap();
    let disk = match DiskRate::on(folder.path(), 1 << 20) {
        Ok(disk) => disk,
        Err(error) => return eprintln!("SKIPPED: {error}"),
    };
    let Some(groups) = groups(Some(disk)) else { return };
    let file = folder.path().join("written");
    let begun = Instant::now();
    let script = format!("dd if=/dev/zero of={} bs=1M count=4 oflag=direct status=none", file.display());
    drop(run(&script, groups).await);
    assert_eq!(fs::metadata(&file).unwrap().len(), 4 << 20);
    let took = begun.elapsed();
    // That it is not faster is the limit's work; how much slower is not judged.
    assert!(took >= Duration::from_secs(2), "4 MiB at 1 MiB/s were written within {took:?}");
}
