//! A running guest's snapshot, and the children that are restored from it.

use std::{fs::File, os::unix::fs::FileExt};

use stasis_vmm_api::{Disk, Event, LiveReport, MachineSpec, Reply, Request};

use crate::{
    contents,
    guest::{self, counted},
    kvm, reopened, snapshot,
    vmm::{Vmm, machine},
};

/// A template of the counting guest: image and state.
fn template(kvm: &File, machine: &MachineSpec, disks: &[File]) -> (File, File) {
    let mut vmm = Vmm::start();
    let disks = disks.iter().map(|disk| disk.try_clone().unwrap()).collect();
    vmm.boot_with(kvm.try_clone().unwrap(), &guest::count(), machine.clone(), disks).unwrap();
    let made = snapshot(&mut vmm);
    vmm.end();
    made
}

fn restored(kvm: &File, (image, state): (&File, &File), machine: &MachineSpec, disks: &[File]) -> Vmm {
    let mut vmm = Vmm::start();
    let disks = disks.iter().map(|disk| disk.try_clone().unwrap());
    let files = [kvm.try_clone().unwrap(), image.try_clone().unwrap(), reopened(state)].into_iter().chain(disks);
    let reply = vmm.restore(machine.clone(), files.collect());
    assert!(matches!(reply, Reply::Built(_)), "{reply:?}");
    vmm
}

pub(crate) fn clone_of(image: &File) -> File {
    let clone = tempfile::tempfile().unwrap();
    clone.write_all_at(&contents(image), 0).unwrap();
    clone
}

fn empty() -> File {
    tempfile::tempfile().unwrap()
}

/// Takes one of a VM that was restored from `image`.
fn live(vmm: &mut Vmm, image: &File) -> (File, File, LiveReport) {
    let (clone, state) = (clone_of(image), empty());
    let files = vec![clone.try_clone().unwrap(), reopened(&state)];
    assert_eq!(vmm.ask(&Request::LiveSnapshot, files), Reply::Done);
    match vmm.event() {
        Event::LiveSnapshot(report) => (clone, state, report),
        other => panic!("{other:?}"),
    }
}

/// The count in an image.
fn count_in(image: &File) -> u64 {
    let mut number = [0; 8];
    image.read_exact_at(&mut number, guest::COUNTER).unwrap();
    u64::from_le_bytes(number)
}

fn goes_on(vmm: &mut Vmm) {
    let before = vmm.console();
    let last = counted(&before).last().copied().unwrap_or_default();
    vmm.console_until(|tail| counted(tail).last().is_some_and(|now| *now > last));
}

fn refusal(vmm: &mut Vmm, files: Vec<File>) -> String {
    match vmm.ask(&Request::LiveSnapshot, files) {
        Reply::Failed { reason } => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn children_go_on_from_one_moment_and_the_parent_too() {
    let kvm = kvm_or_return!();
    for vcpus in [1, 2] {
        let machine = machine(vcpus);
        let (image, state) = template(&kvm, &machine, &[]);
        let pristine = contents(&image);
        let mut parent = restored(&kvm, (&image, &state), &machine, &[]);
        parent.done(&Request::Resume);
        parent.console_until(|tail| counted(tail).len() > 3);
        for children in [1, 10] {
            let (fork, fork_state, report) = live(&mut parent, &image);
            assert!(report.written_bytes >= 4096 && !report.cuts_connections, "{report:?}");
            goes_on(&mut parent);
            let (at, bytes) = (count_in(&fork), contents(&fork));
            assert!(at > 256);
            let mut all: Vec<_> =
                (0..children).map(|_| restored(&kvm, (&fork, &reopened(&fork_state)), &machine, &[])).collect();
            for child in &mut all {
                child.done(&Request::Resume);
            }
            for child in &mut all {
                let tail = child.console_until(|tail| counted(tail).iter().any(|number| *number > at));
                let first = counted(&tail).into_iter().find(|number| *number > at).unwrap();
                // Two vCPUs count at once, and may miss a line.
                assert!(first <= at + 512 * u64::from(vcpus), "{at}, then {first}");
            }
            goes_on(&mut parent);
            all.into_iter().for_each(Vmm::end);
            assert!(contents(&fork) == bytes, "what the parent and the children wrote later reaches no snapshot");
        }
        assert!(contents(&image) == pristine);
        parent.end();
    }
}

#[test]
fn a_live_snapshot_is_what_a_snapshot_in_a_pause_would_be() {
    let kvm = kvm_or_return!();
    let machine = machine(1);
    let (image, state) = template(&kvm, &machine, &[]);
    let mut vmm = restored(&kvm, (&image, &state), &machine, &[]);
    vmm.done(&Request::Resume);
    for _ in 0..5 {
        goes_on(&mut vmm);
        vmm.done(&Request::Pause);
        let (live, _, _) = live(&mut vmm, &image);
        assert_eq!(vmm.console(), vmm.console(), "it stays paused");
        let still = clone_of(&image);
        let reply = vmm.ask(&Request::Snapshot, vec![still.try_clone().unwrap(), empty()]);
        assert!(matches!(reply, Reply::Snapshotted(_)), "{reply:?}");
        assert!(contents(&live) == contents(&still));
        vmm.done(&Request::Resume);
    }
    vmm.end();
}

/// Adds one to the first word of every page from 2 to 6 MiB, in order, again and again: so at any one moment the words are `n + 1` up to some
/// page and `n` behind it.
const SWEEP: [u8; 34] = [
    b'S', b'T', b'A', b'S', b'F', b'L', b'A', b'T', // entered behind this
    0x48, 0xc7, 0xc0, 0x00, 0x00, 0x20, 0x00, // 1: mov rax, 2 MiB
    0x48, 0xff, 0x00, // 2: inc qword [rax]
    0x48, 0x05, 0x00, 0x10, 0x00, 0x00, // add rax, 4096
    0x48, 0x3d, 0x00, 0x00, 0x60, 0x00, // cmp rax, 6 MiB
    0x72, 0xef, // jb 2b
    0xeb, 0xe6, // jmp 1b
];

/// The words of the sweeping guest in an image, which must be of one moment: the first and the last.
fn swept(image: &File) -> (u64, u64) {
    let bytes = contents(image);
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let words: Vec<u64> = (2 << 20..6 << 20).step_by(4096).map(word).collect();
    let (first, last) = (words[0], *words.last().unwrap());
    assert!(words.is_sorted_by(|a, b| a >= b) && first - last <= 1, "of more than one moment: {words:?}");
    (first, last)
}

/// Far more is written, and faster, than is left to the pause, so that every page is copied more than once.
#[test]
fn memory_that_is_written_meanwhile_is_of_one_moment() {
    let kvm = kvm_or_return!();
    for memory_mib in [8, 64] {
        let machine = MachineSpec { memory_mib, ..machine(1) };
        let mut vmm = Vmm::start();
        vmm.boot_with(kvm.try_clone().unwrap(), &SWEEP, machine.clone(), vec![]).unwrap();
        let (mut image, mut state) = snapshot(&mut vmm);
        vmm.end();
        let mut last = 0;
        for _ in 0..3 {
            let mut vmm = restored(&kvm, (&image, &reopened(&state)), &machine, &[]);
            vmm.done(&Request::Resume);
            for _ in 0..5 {
                let (fork, fork_state, report) = live(&mut vmm, &image);
                eprintln!("{memory_mib} MiB: {report:?}");
                let (now, _) = swept(&fork);
                assert!(now >= last, "{last}, then {now}");
                last = now;
                if last > 0 && report.written_bytes > report.paused_bytes {
                    (image, state) = (fork, fork_state);
                    break;
                }
            }
            vmm.end();
        }
        assert!(last > 0);
    }
}

#[test]
fn what_cannot_be_snapshotted_is_refused_and_runs_on() {
    let kvm = kvm_or_return!();
    let machine = machine(1);
    let mut vmm = Vmm::start();
    assert!(refusal(&mut vmm, vec![empty(), empty()]).contains("no VM yet"));
    vmm.boot(kvm.try_clone().unwrap(), &guest::count(), 1).unwrap();
    assert!(refusal(&mut vmm, vec![empty(), empty()]).contains("only a restored VM"));
    let (image, state) = snapshot(&mut vmm);
    vmm.end();

    let mut vmm = restored(&kvm, (&image, &state), &machine, &[]);
    vmm.done(&Request::Resume);
    assert!(refusal(&mut vmm, vec![empty()]).contains("too few files"));
    assert!(refusal(&mut vmm, vec![empty(), empty()]).contains("no clone"));
    assert!(refusal(&mut vmm, vec![clone_of(&image), empty(), empty()]).contains("one file for each disk"));
    goes_on(&mut vmm);
    live(&mut vmm, &image);
    vmm.end();
}

/// Files that cannot be written, at each of the steps. The last is a disk's clone between two volumes.
#[test]
fn the_source_goes_on_whatever_fails() {
    let kvm = kvm_or_return!();
    let machine = MachineSpec { disks: vec![Disk { read_only: false, rate: None }], ..machine(1) };
    let disk = empty();
    disk.set_len(1 << 20).unwrap();
    let (image, state) = template(&kvm, &machine, std::slice::from_ref(&disk));
    let mut vmm = restored(&kvm, (&image, &state), &machine, std::slice::from_ref(&disk));
    vmm.done(&Request::Resume);
    goes_on(&mut vmm);
    let read_only = |file: &File| {
        use std::os::fd::AsRawFd;
        File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap()
    };
    let steps: [(Vec<File>, &str); 3] = [
        (vec![read_only(&clone_of(&image)), empty(), empty()], "memory image"),
        (vec![clone_of(&image), empty(), File::open("/dev/null").unwrap()], "FICLONE"),
        (vec![clone_of(&image), empty(), read_only(&empty())], "FICLONE"),
    ];
    for (files, expected) in steps {
        assert_eq!(vmm.ask(&Request::LiveSnapshot, files), Reply::Done);
        let Event::LiveSnapshotFailed { reason } = vmm.event() else { panic!("it succeeded") };
        assert!(reason.contains(expected), "{reason}");
        goes_on(&mut vmm);
    }
    vmm.end();
}

#[test]
fn a_rewind_gives_it_up() {
    let kvm = kvm_or_return!();
    let machine = machine(1);
    let (image, state) = template(&kvm, &machine, &[]);
    let mut vmm = restored(&kvm, (&image, &state), &machine, &[]);
    for _ in 0..20 {
        vmm.done(&Request::Resume);
        goes_on(&mut vmm);
        let files = vec![clone_of(&image), empty()];
        vmm.send(&Request::LiveSnapshot, files);
        vmm.send(&Request::Rewind, vec![]);
        assert_eq!(vmm.reply(), Reply::Done);
        assert!(matches!(vmm.reply(), Reply::Rewound(_)));
        // Which of the two was first is a matter of luck; that there is one end is not.
        match vmm.event() {
            Event::LiveSnapshot(_) => {}
            Event::LiveSnapshotFailed { reason } => assert!(reason.contains("rewound"), "{reason}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(vmm.console(), "");
    }
    vmm.end();
}

#[test]
fn a_rewind_after_one_is_as_before() {
    let kvm = kvm_or_return!();
    let machine = machine(1);
    let (image, state) = template(&kvm, &machine, &[]);
    let mut vmm = restored(&kvm, (&image, &state), &machine, &[]);
    let mut first = None;
    for _ in 0..10 {
        vmm.done(&Request::Resume);
        let tail = vmm.console_until(|tail| counted(tail).len() > 1);
        assert_eq!(counted(&tail)[0], *first.get_or_insert(counted(&tail)[0]));
        live(&mut vmm, &image);
        goes_on(&mut vmm);
        let reply = vmm.ask(&Request::Rewind, vec![]);
        assert!(matches!(reply, Reply::Rewound(_)), "{reply:?}");
    }
    vmm.end();
}
