//! What an event loop in between would make a matter of luck: here there is none.

use std::{
    os::{fd::AsRawFd, unix::fs::FileExt},
    sync::mpsc,
};

use stasis_vmm_api::Disk;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK};

use super::*;
use crate::{guest, vcpu};

struct NoWatch;

impl Watch for NoWatch {
    fn watch(&self, _: std::os::fd::BorrowedFd<'_>, _: u64, _: Events) -> std::io::Result<()> {
        Ok(())
    }
}

fn host(stopped: EventFd) -> HostSide {
    let rung = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).unwrap();
    HostSide { watch: Arc::new(NoWatch), stops: mpsc::channel().0, stopped, rung }
}

#[test]
fn a_notification_that_waits_is_served_before_a_snapshot() {
    let kvm = match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(kvm) => kvm,
        Err(error) => return eprintln!("SKIPPED: /dev/kvm: {error}"),
    };
    vcpu::install_kick_handler().unwrap();
    let (kernel, disk) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    kernel.write_all_at(&guest::read_disk(), 0).unwrap();
    disk.write_all_at(&[b'D'; 512], 0).unwrap();
    let machine = MachineSpec {
        memory_mib: 8,
        vcpus: 1,
        disks: vec![Disk { read_only: true, rate: None }],
        ..Default::default()
    };
    let stopped = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).unwrap();
    let host = host(stopped);
    let shell = Shell::prepare(machine, kvm, None, &host).unwrap();
    let (mut vm, _) = Vm::boot(shell, "", kernel, None, vec![disk], &host).unwrap();

    vm.resume().unwrap();
    vm.let_run().unwrap();
    let mut poll = libc::pollfd { fd: vm.notifications[0].event.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, which lives through the call.
    assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 30_000) }, 1, "the guest's driver notifies");
    vm.pause(Lasts::Long).unwrap();
    let used = |vm: &Vm| vm.bus.memory.read_obj::<u16>(GuestAddress(guest::USED_INDEX)).unwrap();
    assert_eq!(used(&vm), 0);
    let (image, state) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    vm.snapshot(&image, state, &Pagemap::of_this_process().unwrap()).unwrap();
    assert_eq!(used(&vm), 1, "a snapshot keeps no notification, so it must keep the answer");
    let mut saved = [0; 2];
    image.read_exact_at(&mut saved, guest::USED_INDEX).unwrap();
    assert_eq!(saved, [1, 0]);
}

/// What is written between the last round and the pause, by the guest or by a device in its name.
#[test]
fn a_live_snapshot_holds_what_was_written_at_the_last_moment() {
    const AT: [u64; 3] = [0x20_0000, 0x30_0000, 0x40_0000];
    let open = || File::options().read(true).write(true).open("/dev/kvm");
    let (Ok(first), Ok(second)) = (open(), open()) else { return eprintln!("SKIPPED: /dev/kvm cannot be opened") };
    vcpu::install_kick_handler().unwrap();
    let kernel = tempfile::tempfile().unwrap();
    kernel.write_all_at(&guest::count(), 0).unwrap();
    let machine = MachineSpec { memory_mib: 8, vcpus: 1, ..Default::default() };
    let stopped = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).unwrap();
    let host = host(stopped);
    let pagemap = Pagemap::of_this_process().unwrap();
    let (image, mut state) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let (vm, _) =
        Vm::boot(Shell::prepare(machine.clone(), first, None, &host).unwrap(), "", kernel, None, vec![], &host)
            .unwrap();
    vm.snapshot(&image, state.try_clone().unwrap(), &pagemap).unwrap();
    std::io::Seek::rewind(&mut state).unwrap();
    let state = VmState::read(&state).unwrap();
    let mut shell = Shell::prepare(machine, second, None, &host).unwrap();
    shell.foresee(state).unwrap();
    let (mut vm, _) = Vm::restore(shell, &image, vec![], &host).unwrap();

    let uffd = crate::uffd::Uffd::write_protecting().unwrap();
    let write = |vm: &Vm, at, value: u8| vm.bus.memory.write_obj(value, GuestAddress(at)).unwrap();
    let clone = tempfile::tempfile().unwrap();
    let mut bytes = vec![0; 8 << 20];
    image.read_exact_at(&mut bytes, 0).unwrap();
    clone.write_all_at(&bytes, 0).unwrap();
    write(&vm, AT[0], 1);
    write(&vm, AT[1], 1);
    let mut live = vm.live_begin(&uffd, clone.try_clone().unwrap(), tempfile::tempfile().unwrap(), vec![]).unwrap();
    assert_eq!(vm.live_step(&mut live, &pagemap, &uffd).unwrap(), None);
    write(&vm, AT[1], 2);
    write(&vm, AT[2], 2);
    let report = vm.live_step(&mut live, &pagemap, &uffd).unwrap().unwrap();
    assert!(report.paused_bytes >= 3 * 4096, "{report:?}");
    write(&vm, AT[0], 3);
    for (at, expected) in AT.into_iter().zip([1, 2, 2]) {
        let mut found = [0];
        clone.read_exact_at(&mut found, at).unwrap();
        assert_eq!(found, [expected], "{at:#x}");
    }
    vm.live_end(&uffd).unwrap();
}
