//! A used VM is what it was right after its restore.

use std::{fs::File, os::fd::OwnedFd, os::unix::fs::FileExt};

use stasis_vmm_api::{Disk, MachineSpec, Reply, Request, RewindReport, Stop};

use crate::{
    contents,
    guest::{self, counted},
    kvm, reopened, snapshot,
    vmm::{Vmm, machine},
};

/// A paused VM made from a snapshot of `kernel`, which was let to print a little first.
fn restored(kvm: &File, kernel: &[u8], machine: &MachineSpec, disks: &[File]) -> Vmm {
    let disks = || disks.iter().map(|disk| disk.try_clone().unwrap());
    let mut vmm = Vmm::start();
    vmm.boot_with(kvm.try_clone().unwrap(), kernel, machine.clone(), disks().collect()).unwrap();
    vmm.done(&Request::Resume);
    vmm.console_until(|tail| tail.len() > 40);
    vmm.done(&Request::Pause);
    let (image, state) = snapshot(&mut vmm);
    vmm.end();
    let mut vmm = Vmm::start();
    let files = [kvm.try_clone().unwrap(), image, reopened(&state)].into_iter().chain(disks()).collect();
    let reply = vmm.restore(machine.clone(), files);
    assert!(matches!(reply, Reply::Built(_)), "{reply:?}");
    vmm
}

fn rewind(vmm: &mut Vmm) -> RewindReport {
    match vmm.ask(&Request::Rewind, vec![]) {
        Reply::Rewound(report) => report,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_life_starts_at_the_snapshot() {
    let kvm = kvm_or_return!();
    for vcpus in [1, 2] {
        let mut vmm = restored(&kvm, &guest::count(), &machine(vcpus), &[]);
        let never_ran = rewind(&mut vmm);
        assert_eq!(never_ran.dirty_bytes, 0);
        let mut first = None;
        for life in 0..200 {
            assert_eq!(vmm.console(), "", "nothing of the life before is left");
            vmm.done(&Request::Resume);
            let tail = vmm.console_until(|tail| !counted(tail).is_empty());
            let start = *first.get_or_insert(counted(&tail)[0]);
            assert_eq!(counted(&tail)[0], start, "life {life} goes on where the snapshot stopped");
            if life % 2 == 0 {
                vmm.done(&Request::Pause);
            }
            let report = rewind(&mut vmm);
            assert!((4096..=64 << 10).contains(&report.dirty_bytes), "life {life}: {report:?}");
        }
        vmm.end();
    }
}

/// Each life has a canary of its own in memory, on the console and in a stream's way. None is there in the next, and nothing piles up.
#[test]
fn a_thousand_lives_leave_nothing() {
    const CANARY: u64 = guest::COUNTER;
    let kvm = kvm_or_return!();
    let mut vmm = restored(&kvm, &guest::count(), &machine(1), &[]);
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let resident_kib = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
    };
    let (mut first, mut before) = (None, None);
    for life in 0..1000 {
        if life == 100 {
            before = Some((open(), resident_kib()));
        }
        vmm.done(&Request::Resume);
        let (stream, _far) = std::os::unix::net::UnixStream::pair().unwrap();
        vmm.ask(&Request::Connect { port: 5 }, vec![File::from(OwnedFd::from(stream))]);
        let tail = vmm.console_until(|tail| !counted(tail).is_empty());
        let start = *first.get_or_insert(counted(&tail)[0]);
        assert_eq!(counted(&tail)[0], start, "life {life}: the count at {CANARY:#x} is the last life's");
        rewind(&mut vmm);
        assert_eq!(vmm.console(), "");
    }
    let (open_before, resident_before) = before.unwrap();
    assert_eq!(open(), open_before, "descriptors pile up");
    let grown = resident_kib().saturating_sub(resident_before);
    assert!(grown < 4096, "{grown} KiB have piled up in 900 lives");
    vmm.end();
}

#[test]
fn a_disk_request_in_flight_is_forgotten() {
    let kvm = kvm_or_return!();
    let machine = MachineSpec { disks: vec![Disk { read_only: true, rate: None }], ..machine(1) };
    let disk = tempfile::tempfile().unwrap();
    disk.write_all_at(&[b'D'; 512], 0).unwrap();
    let mut vmm = restored(&kvm, &guest::read_disk(), &machine, &[disk.try_clone().unwrap()]);
    for life in 0..50u8 {
        let letter = b'a' + life % 26;
        disk.write_all_at(&[letter; 512], 0).unwrap();
        vmm.done(&Request::Resume);
        let tail = vmm.console_until(|tail| tail.len() > 5);
        // What the snapshot had already read is the snapshot's; the rest is this life's.
        let own = tail.bytes().skip_while(|byte| *byte == b'D');
        assert!(own.clone().count() > 1 && own.clone().all(|byte| byte == letter), "{letter}: {tail}");
        rewind(&mut vmm);
    }
    vmm.end();
}

#[test]
fn streams_end_with_their_life() {
    let kvm = kvm_or_return!();
    let mut vmm = restored(&kvm, &guest::count(), &machine(1), &[]);
    vmm.done(&Request::Resume);
    let (stream, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
    assert_eq!(vmm.ask(&Request::Connect { port: 5 }, vec![File::from(OwnedFd::from(stream))]), Reply::Done);
    rewind(&mut vmm);
    assert_eq!(std::io::Read::read(&mut far, &mut [0]).unwrap(), 0);
    vmm.end();
}

/// A snapshot of a VM that was itself restored is the clone of its image with the changes in it: none of a chain is needed but the last.
#[test]
fn snapshots_of_restored_vms_go_on_where_they_stopped() {
    let kvm = kvm_or_return!();
    let mut vmm = Vmm::start();
    vmm.boot(kvm.try_clone().unwrap(), &guest::count(), 1).unwrap();
    let (mut image, mut state) = snapshot(&mut vmm);
    vmm.end();
    let mut last = 0;
    for _ in 0..5 {
        let mut vmm = Vmm::start();
        let files = vec![kvm.try_clone().unwrap(), image.try_clone().unwrap(), reopened(&state)];
        assert!(matches!(vmm.restore(machine(1), files), Reply::Built(_)));
        vmm.done(&Request::Resume);
        let tail = vmm.console_until(|tail| counted(tail).len() > 3);
        let numbers = counted(&tail);
        assert!(last == 0 || (last..=last + 512).contains(&numbers[0]), "{last}, then {numbers:?}");
        vmm.done(&Request::Pause);
        let clone = tempfile::tempfile().unwrap();
        clone.write_all_at(&contents(&image), 0).unwrap();
        let next = tempfile::tempfile().unwrap();
        let reply = vmm.ask(&Request::Snapshot, vec![clone.try_clone().unwrap(), reopened(&next)]);
        let Reply::Snapshotted(report) = reply else { panic!("{reply:?}") };
        assert!((4096..=64 << 10).contains(&report.written_bytes), "{report:?}");
        // The source goes on, and is none the worse for it.
        let seen = counted(&vmm.console()).len();
        vmm.done(&Request::Resume);
        vmm.console_until(|tail| counted(tail).len() > seen);
        rewind(&mut vmm);
        vmm.end();
        let at = usize::try_from(guest::COUNTER).unwrap();
        last = u64::from_le_bytes(contents(&clone)[at..at + 8].try_into().unwrap());
        (image, state) = (clone, next);
    }
}

#[test]
fn what_cannot_be_rewound_is_refused() {
    let kvm = kvm_or_return!();
    let mut vmm = Vmm::start();
    assert!(vmm.refused(&Request::Rewind).contains("no VM yet"));
    vmm.boot(kvm.try_clone().unwrap(), &guest::count(), 1).unwrap();
    assert!(vmm.refused(&Request::Rewind).contains("only a restored VM"));
    vmm.end();

    // Its reset line pulled, the guest is over.
    let kernel = guest::say_ok();
    let mut vmm = Vmm::start();
    vmm.boot(kvm.try_clone().unwrap(), &kernel, 1).unwrap();
    let (image, state) = snapshot(&mut vmm);
    vmm.end();
    let mut vmm = Vmm::start();
    assert!(matches!(vmm.restore(machine(1), vec![kvm, image, reopened(&state)]), Reply::Built(_)));
    vmm.done(&Request::Resume);
    let stasis_vmm_api::Event::Stopped { why: Stop::Shutdown, .. } = vmm.event() else { panic!() };
    assert!(vmm.refused(&Request::Rewind).contains("stopped for good"));
    vmm.end();
}
