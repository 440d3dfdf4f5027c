mod limits;

use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf};

use stasis_vmm_api::MachineSpec;

use super::*;
use crate::{admission::Admission, cgroup::Groups};

/// A "VMM" that holds its control socket and says nothing.
pub(crate) struct Mute {
    _folder: tempfile::TempDir,
    program: PathBuf,
}

impl Mute {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("mute");
        fs::write(&program, "#!/bin/sh\nexec sleep 1000\n").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        Self { _folder: folder, program }
    }

    /// None, and a word about it, where namespaces cannot be made.
    pub(crate) fn spawner(&self) -> Option<Spawner> {
        let spawner = Spawner::start(&self.program, Vec::new(), 7000, Groups::none());
        if let Err(error) = &spawner {
            eprintln!("SKIPPED: {error}");
        }
        spawner.ok()
    }
}

pub(crate) static MACHINE: MachineSpec =
    MachineSpec { memory_mib: 1, vcpus: 1, disks: Vec::new(), network: None, rng: false, balloon: false, paged: false };

#[tokio::test]
async fn each_is_first_in_its_own_pid_namespace_and_has_its_own_uid_until_it_is_reaped() {
    let mute = Mute::new();
    let Some(spawner) = mute.spawner() else { return };
    let admission = Admission::new(1 << 30);
    let mut vms = Vec::new();
    for _ in 0..3 {
        vms.push(Vmm::spawn(&spawner, &MACHINE, admission.reserve(1).unwrap()).await.unwrap().0);
    }
    let mut namespaces: Vec<_> =
        vms.iter().map(|vm| fs::read_link(format!("/proc/{}/ns/pid", vm.pid())).unwrap()).collect();
    namespaces.push(fs::read_link("/proc/self/ns/pid").unwrap());
    namespaces.sort();
    namespaces.dedup();
    assert_eq!(namespaces.len(), 4);
    for vm in &vms {
        let status = fs::read_to_string(format!("/proc/{}/status", vm.pid())).unwrap();
        assert!(status.contains(&format!("NSpid:\t{}\t1\n", vm.pid())), "{status}");
    }
    assert_eq!(spawner.free_uids(), 4093);
    let pids: Vec<_> = vms.iter().map(Vmm::pid).collect();
    drop(vms);
    admission.all_returned().await;
    assert_eq!(spawner.free_uids(), 4096);
    for pid in pids {
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "{pid} lives, or was not reaped");
    }
}

#[tokio::test]
async fn two_thousand_births_and_ends_leave_nothing() {
    let mute = Mute::new();
    let Some(spawner) = mute.spawner() else { return };
    let admission = Admission::new(1 << 30);
    let entries = |place: &str| fs::read_dir(place).unwrap().count();
    let left = || (entries("/proc/self/fd"), entries("/proc/self/task"));
    let mut before = None;
    for round in 0..101 {
        let births = (0..20).map(|_| Vmm::spawn(&spawner, &MACHINE, admission.reserve(1).unwrap()));
        drop(futures_util::future::join_all(births).await.into_iter().collect::<Result<Vec<_>, _>>().unwrap());
        while admission.available_mib() < 1024 {
            tokio::task::yield_now().await;
        }
        if round == 0 {
            // The runtime has what it will have.
            before = Some(left());
        }
    }
    assert_eq!(Some(left()), before);
    assert_eq!(spawner.free_uids(), 4096);
    let children = fs::read_to_string(format!("/proc/self/task/{}/children", std::process::id())).unwrap_or_default();
    assert_eq!(children, "", "a child lives, or was not reaped");
}

/// Whoever asked for it may be gone before it is born.
#[tokio::test]
async fn a_process_that_nobody_waits_for_any_more_is_ended() {
    let mute = Mute::new();
    let Some(spawner) = mute.spawner() else { return };
    let admission = Admission::new(1 << 30);
    for _ in 0..10 {
        let asked = Vmm::spawn(&spawner, &MACHINE, admission.reserve(1).unwrap());
        // Polled once, so that it is under way, then dropped.
        tokio::select! {
            biased;
            vm = asked => drop(vm.unwrap()),
            () = std::future::ready(()) => {}
        }
    }
    admission.all_returned().await;
    assert_eq!(spawner.free_uids(), 4096);
}

#[tokio::test]
async fn a_program_that_is_not_there_is_an_error_that_costs_nothing() {
    let mute = Mute::new();
    let Some(spawner) = mute.spawner() else { return };
    fs::remove_file(&mute.program).unwrap();
    let admission = Admission::new(1 << 30);
    let error = Vmm::spawn(&spawner, &MACHINE, admission.reserve(1).unwrap()).await.unwrap_err();
    assert!(error.to_string().contains("No such file"), "{error}");
    assert_eq!((spawner.free_uids(), admission.available_mib()), (4096, 1024));
}
