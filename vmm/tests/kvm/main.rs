//! Whole VMs on the host's KVM, over the control socket as the node speaks it. The guests are a few instructions each, which run
//! under KVM's emulator too.

#![allow(clippy::unwrap_used, clippy::panic, reason = "that is how tests fail")]

#[allow(dead_code, reason = "src/vm/tests.rs uses it too")]
mod guest;
mod vmm;

use std::{fs::File, os::fd::OwnedFd, os::unix::fs::FileExt};

use stasis_vmm_api::{Disk, Event, Network, RateLimit, Reply, Request, Stop, TokenBucket};

use guest::{COUNTER, counted};
use vmm::{Vmm, machine};

/// `/dev/kvm`, or a word that there is none.
fn kvm() -> Option<File> {
    let file = File::options().read(true).write(true).open("/dev/kvm");
    if let Err(error) = &file {
        eprintln!("SKIPPED: /dev/kvm: {error}");
    }
    file.ok()
}

macro_rules! kvm_or_return {
    () => {
        match kvm() {
            Some(kvm) => kvm,
            None => return,
        }
    };
}

// Behind the macro that it uses.
mod flat;
mod live;
mod model;
mod rewind;
mod wake;

fn contents(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// Snapshots a paused VM: memory image and state.
fn snapshot(vmm: &mut Vmm) -> (File, File) {
    let (image, state) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let reply = vmm.ask(&Request::Snapshot, vec![image.try_clone().unwrap(), reopened(&state)]);
    assert!(matches!(reply, Reply::Snapshotted(_)), "{reply:?}");
    (image, reopened(&state))
}

/// The same file with an offset of its own.
fn reopened(file: &File) -> File {
    use std::os::fd::AsRawFd;
    File::options().read(true).write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap()
}

#[test]
fn a_guest_prints_and_pulls_its_reset_line() {
    let kvm = kvm_or_return!();
    let mut vmm = Vmm::start();
    vmm.boot(kvm, &guest::say_ok(), 1).unwrap();
    vmm.done(&Request::Resume);
    let Event::Stopped { why, console } = vmm.event() else { panic!() };
    assert_eq!((why, console.as_str()), (Stop::Shutdown, "ok"));
    for request in [Request::Resume, Request::Pause] {
        assert!(vmm.refused(&request).contains("stopped for good"));
    }
    assert_eq!(vmm.ask(&Request::Console, vec![]), Reply::Console { tail: "ok".into() }, "the process lives on");
    vmm.end();
}

#[test]
fn a_guest_that_cannot_go_on_is_a_crash_with_its_place() {
    for code in [&[0x0f, 0x0b, 0xf4][..], &[0xf3, 0x0f, 0xb8, 0xc0, 0x0f, 0x0b, 0xf4]] {
        let mut vmm = Vmm::start();
        vmm.boot(kvm_or_return!(), &guest::elf(code), 1).unwrap();
        vmm.done(&Request::Resume);
        let Event::Stopped { why: Stop::Crash(crash), .. } = vmm.event() else { panic!() };
        // ud2 without an interrupt table is a triple fault; popcnt is one more thing that KVM's emulator does not know.
        if crash.exit.contains("INTERNAL_ERROR") {
            assert_eq!((crash.rip, crash.vcpu), (guest::ENTRY, 0));
            let start: String = code[..2].iter().map(|byte| format!("{byte:02x}")).collect();
            assert!(crash.instruction.starts_with(&start), "{crash}");
        } else {
            assert!(crash.exit.contains("SHUTDOWN"), "{crash}");
        }
        vmm.end();
    }
}

#[test]
fn a_snapshot_goes_on_where_it_stopped_and_its_image_stays_as_it_was() {
    let kvm = kvm_or_return!();
    let mut vmm = Vmm::start();
    vmm.boot(kvm.try_clone().unwrap(), &guest::count(), 1).unwrap();
    vmm.done(&Request::Resume);
    let before = vmm.console_until(|tail| counted(tail).len() > 3);
    assert_eq!(counted(&before)[0], 256);
    assert!(vmm.refused(&Request::Snapshot).contains("too few files"));
    let files = || vec![tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
    let reply = vmm.ask(&Request::Snapshot, files());
    assert!(matches!(&reply, Reply::Failed { reason } if reason.contains("pause it first")), "{reply:?}");
    vmm.done(&Request::Pause);
    let (image, state) = snapshot(&mut vmm);
    vmm.end();

    let bytes = contents(&image);
    let at = usize::try_from(COUNTER).unwrap();
    let saved = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert!(saved >= 256 * 3);
    for _ in 0..2 {
        let mut vmm = Vmm::start();
        let files = vec![kvm.try_clone().unwrap(), image.try_clone().unwrap(), reopened(&state)];
        assert!(matches!(vmm.restore(machine(1), files), Reply::Built(_)));
        vmm.done(&Request::Resume);
        let tail = vmm.console_until(|tail| counted(tail).len() > 2);
        let first = counted(&tail)[0];
        assert!((saved - 256..=saved + 512).contains(&first), "saved at {saved}, went on at {first}");
        vmm.end();
        assert!(contents(&image) == bytes, "the image is nobody's to write");
    }
}

#[test]
fn no_pause_is_lost_and_nothing_runs_after_it() {
    let kvm = kvm_or_return!();
    for vcpus in [1, 2] {
        let mut vmm = Vmm::start();
        vmm.boot(kvm.try_clone().unwrap(), &guest::count(), vcpus).unwrap();
        for _ in 0..100 {
            vmm.done(&Request::Resume);
            vmm.done(&Request::Pause);
            assert_eq!(vmm.console(), vmm.console());
        }
        vmm.done(&Request::Pause); // once more makes no difference
        vmm.done(&Request::Resume);
        vmm.done(&Request::Resume);
        vmm.console_until(|tail| !counted(tail).is_empty());
        vmm.end();
    }
}

/// A string of port writes is one instruction and many exits: wherever a pause cuts it, the snapshot neither loses nor repeats one.
#[test]
fn no_port_write_is_lost_or_repeated_by_a_snapshot() {
    let kvm = kvm_or_return!();
    let mut vmm = Vmm::start();
    vmm.boot(kvm.try_clone().unwrap(), &guest::alphabet(), 1).unwrap();
    for _ in 0..10 {
        vmm.done(&Request::Resume);
        vmm.console_until(|tail| tail.len() > 10);
        vmm.done(&Request::Pause);
        let before = vmm.console();
        let (image, state) = snapshot(&mut vmm);

        let mut restored = Vmm::start();
        let files = vec![kvm.try_clone().unwrap(), image, state];
        assert!(matches!(restored.restore(machine(1), files), Reply::Built(_)));
        restored.done(&Request::Resume);
        let after = restored.console_until(|tail| tail.len() > 60);
        restored.end();
        let all = [before.as_bytes(), after.as_bytes()].concat();
        let next = |letter: u8| if letter == b'z' { b'a' } else { letter + 1 };
        assert!(all.windows(2).all(|pair| pair[1] == next(pair[0])), "{before}|{after}");
    }
    vmm.end();
}

/// The guest's request may be anywhere when a pause comes: not yet notified, notified, served. The restored guest gets its answer.
#[test]
fn a_disk_request_in_flight_is_answered_before_or_after_a_restore() {
    let kvm = kvm_or_return!();
    let machine = stasis_vmm_api::MachineSpec { disks: vec![Disk { read_only: true, rate: None }], ..machine(1) };
    let disk = tempfile::tempfile().unwrap();
    disk.write_all_at(&[b'D'; 512], 0).unwrap();
    let mut vmm = Vmm::start();
    let kernel = guest::read_disk();
    vmm.boot_with(kvm.try_clone().unwrap(), &kernel, machine.clone(), vec![disk.try_clone().unwrap()]).unwrap();
    for _ in 0..10 {
        vmm.done(&Request::Resume);
        let before = vmm.console().len();
        vmm.console_until(|tail| tail.len() > before + 3);
        // At once, so that nothing is served between the two.
        let (image, state) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        vmm.send(&Request::Pause, vec![]);
        vmm.send(&Request::Snapshot, vec![image.try_clone().unwrap(), reopened(&state)]);
        assert_eq!(vmm.reply(), Reply::Done);
        assert!(matches!(vmm.reply(), Reply::Snapshotted(_)));

        let mut restored = Vmm::start();
        let files = vec![kvm.try_clone().unwrap(), image, state, disk.try_clone().unwrap()];
        assert!(matches!(restored.restore(machine.clone(), files), Reply::Built(_)));
        restored.done(&Request::Resume);
        let tail = restored.console_until(|tail| tail.len() > 3);
        assert!(tail.bytes().all(|byte| byte == b'D'), "{tail}");
        restored.end();
    }
    vmm.end();
}

/// What a rate limit holds back is taken up by its timer; over a pause, and after a restore under another limit.
#[test]
fn a_limited_disk_goes_on() {
    let kvm = kvm_or_return!();
    let one =
        |per_second: u64| TokenBucket { per_second: per_second.try_into().unwrap(), burst: 1.try_into().unwrap() };
    let machine = |per_second| {
        let rate = Some(RateLimit { bytes: None, operations: Some(one(per_second)) });
        stasis_vmm_api::MachineSpec { disks: vec![Disk { read_only: true, rate }], ..machine(1) }
    };
    let disk = tempfile::tempfile().unwrap();
    disk.write_all_at(&[b'D'; 512], 0).unwrap();
    let mut vmm = Vmm::start();
    vmm.boot_with(kvm.try_clone().unwrap(), &guest::read_disk(), machine(100), vec![disk.try_clone().unwrap()])
        .unwrap();
    for _ in 0..5 {
        vmm.done(&Request::Resume);
        let before = vmm.console().len();
        vmm.console_until(|tail| tail.len() > before + 3);
        vmm.done(&Request::Pause);
    }
    let (image, state) = snapshot(&mut vmm);
    vmm.end();
    let mut restored = Vmm::start();
    assert!(matches!(restored.restore(machine(200), vec![kvm, image, state, disk]), Reply::Built(_)));
    restored.done(&Request::Resume);
    let tail = restored.console_until(|tail| tail.len() > 5);
    assert!(tail.bytes().all(|byte| byte == b'D'), "{tail}");
    restored.end();
}

#[test]
fn a_machine_with_more_devices_is_restored_as_what_it_was() {
    let kvm = kvm_or_return!();
    let full = stasis_vmm_api::MachineSpec { rng: true, balloon: true, ..machine(1) };
    let refused = |machine: &stasis_vmm_api::MachineSpec, files| {
        let kvm = kvm.try_clone().unwrap();
        Vmm::start().boot_with(kvm, &guest::count(), machine.clone(), files).unwrap_err()
    };
    let wanting = stasis_vmm_api::MachineSpec { network: Some(Network { mac: [2; 6], rate: None }), ..full.clone() };
    assert!(refused(&wanting, vec![]).contains("one for the network"));
    assert!(refused(&wanting, vec![tempfile::tempfile().unwrap()]).contains("TUNGETIFF"));
    let crowded = stasis_vmm_api::MachineSpec { disks: vec![Disk::default(); 6], ..full.clone() };
    let disks = (0..6).map(|_| tempfile::tempfile().unwrap()).collect();
    assert!(refused(&crowded, disks).contains("too many devices"));

    let mut vmm = Vmm::start();
    vmm.boot_with(kvm.try_clone().unwrap(), &guest::count(), full.clone(), vec![]).unwrap();
    vmm.done(&Request::Balloon { target_mib: 3 });
    assert!(vmm.refused(&Request::Balloon { target_mib: 8 }).contains("smaller than the guest's memory"));
    let (image, state) = snapshot(&mut vmm);
    vmm.end();

    let files = || vec![kvm.try_clone().unwrap(), image.try_clone().unwrap(), reopened(&state)];
    for other in [machine(1), stasis_vmm_api::MachineSpec { rng: false, ..full.clone() }] {
        let reply = Vmm::start().restore(other, files());
        assert!(matches!(&reply, Reply::Failed { reason } if reason.contains("the machine is")), "{reply:?}");
    }
    let mut vmm = Vmm::start();
    assert!(matches!(vmm.restore(full, files()), Reply::Built(_)));
    vmm.done(&Request::Resume);
    vmm.done(&Request::Balloon { target_mib: 0 });
    vmm.console_until(|tail| !counted(tail).is_empty());
    vmm.end();

    let mut vmm = Vmm::start();
    vmm.boot(kvm, &guest::count(), 1).unwrap();
    assert!(vmm.refused(&Request::Balloon { target_mib: 1 }).contains("no balloon"));
    vmm.end();
}

#[test]
fn what_does_not_fit_is_refused_and_the_process_lives() {
    let kvm = kvm_or_return!();
    let mut vmm = Vmm::start();
    for request in [Request::Resume, Request::Pause, Request::Console] {
        assert!(vmm.refused(&request).contains("no VM yet"));
    }
    for wrong in [&b"#!/bin/sh\n"[..], &guest::elf(&[0xf4])[..70]] {
        let mut spoilt = Vmm::start();
        assert!(spoilt.boot(kvm.try_clone().unwrap(), wrong, 1).unwrap_err().contains("guest kernel cannot be loaded"));
        let refused = spoilt.boot(kvm.try_clone().unwrap(), &guest::count(), 1).unwrap_err();
        assert!(refused.contains("can make no other"), "{refused}");
        assert!(spoilt.refused(&Request::Console).contains("no VM yet"));
        spoilt.end();
    }
    for vcpus in [0, 33, 255] {
        assert!(vmm.boot(kvm.try_clone().unwrap(), &guest::count(), vcpus).unwrap_err().contains("1 to 32 vCPUs"));
    }
    assert!(vmm.boot(tempfile::tempfile().unwrap(), &guest::count(), 1).unwrap_err().contains("KVM_CREATE_VM"));
    vmm.boot(kvm.try_clone().unwrap(), &guest::count(), 1).unwrap();
    assert!(vmm.boot(kvm.try_clone().unwrap(), &guest::count(), 1).unwrap_err().contains("a VM already"));
    let (image, state) = snapshot(&mut vmm);
    let (stream, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
    let reply = vmm.ask(&Request::Connect { port: 5 }, vec![File::from(OwnedFd::from(stream))]);
    assert_eq!(reply, Reply::Done);
    assert_eq!(std::io::Read::read(&mut far, &mut [0]).unwrap(), 0, "a guest without a driver refuses");
    vmm.end();

    let restore = |machine, image: &File, state: &File| {
        let mut vmm = Vmm::start();
        let files = vec![kvm.try_clone().unwrap(), image.try_clone().unwrap(), reopened(state)];
        match vmm.restore(machine, files) {
            Reply::Failed { reason } => reason,
            other => panic!("{other:?}"),
        }
    };
    assert!(restore(machine(2), &image, &state).contains("the machine is"));
    let larger = stasis_vmm_api::MachineSpec { memory_mib: 16, ..machine(1) };
    assert!(restore(larger, &image, &state).contains("the machine is"));
    let short = tempfile::tempfile().unwrap();
    assert!(restore(machine(1), &short, &state).contains("memory image has 0 bytes"));
    assert!(restore(machine(1), &image, &short).contains("not a VM's state"));
    let whole = contents(&state);
    for length in [11, 13, whole.len() / 2, whole.len() - 1] {
        let cut = tempfile::tempfile().unwrap();
        cut.write_all_at(&whole[..length], 0).unwrap();
        assert!(restore(machine(1), &image, &cut).contains("the VM's state"), "{length}");
    }
    // Every byte of the head, and some of what follows, turned around: refused or harmless, never the end of the process.
    for at in (8..whole.len()).step_by(whole.len() / 40) {
        let damaged = tempfile::tempfile().unwrap();
        let mut bytes = whole.clone();
        bytes[at] ^= 0xff;
        damaged.write_all_at(&bytes, 0).unwrap();
        let mut vmm = Vmm::start();
        let _ = vmm.restore(machine(1), vec![kvm.try_clone().unwrap(), image.try_clone().unwrap(), damaged]);
        vmm.end();
    }
}
