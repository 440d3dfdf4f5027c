//! Everything of a VM that takes KVM long: done before anybody claims it.

use std::{
    fs::File,
    io::ErrorKind,
    os::fd::{FromRawFd, IntoRawFd},
    sync::Arc,
    time::Instant,
};

use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_userspace_memory_region};
use kvm_ioctls::{IoEventAddress, Kvm, VmFd};
use stasis_vmm_api::MachineSpec;
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{HostSide, IRQCHIPS, devices};
use crate::{
    cpuid,
    error::{Error, Host, Ioctl},
    layout,
    memory::{Prepared, Room},
    snapshot::VmState,
    traits::HostTraits,
    vcpu::{Extent, HostTsc, Offset, Surroundings, Vcpu, VcpuState},
};

/// A VM without memory and devices: KVM's VM, interrupt controllers and lines, vCPU threads, room for memory.
pub(crate) struct Shell {
    pub(super) fd: VmFd,
    pub(super) machine: MachineSpec,
    pub(super) host: HostTraits,
    pub(super) room: Room,
    pub(super) vcpus: Vec<Vcpu>,
    /// The MSRs that KVM lists on this host.
    pub(super) extent: Extent,
    pub(super) serial: EventFd,
    /// What it will be restored to.
    pub(super) foreseen: Option<Foreseen>,
    /// For a paged machine.
    pub(super) pager: Option<Prepared>,
    /// One line per device.
    pub(super) interrupts: Vec<EventFd>,
    pub(crate) notifications: Vec<Notification>,
}

/// What a shell will be restored to.
pub(super) struct Foreseen {
    pub(super) state: Arc<VmState>,
    /// When what KVM keeps of it was put in. None: it can only be put in when the memory is there.
    pub(super) put_in: Option<Instant>,
}

/// The guest has put something into a queue of a device.
pub(crate) struct Notification {
    pub(crate) event: EventFd,
    pub(crate) device: usize,
    pub(crate) queue: usize,
}

impl Notification {
    /// Comes back to it, after everything else that waits.
    pub(super) fn again(&self) -> Result<(), Error> {
        self.event.write(1).host("write to a notification's eventfd")
    }

    /// Takes it, if there is one.
    pub(super) fn take(&self) -> Result<bool, Error> {
        match self.event.read() {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error).host("read of a notification's eventfd"),
        }
    }
}

impl Shell {
    /// Prepares a shell for `machine`. `userfaultfd` is the open device, for a paged one.
    pub(crate) fn prepare(
        machine: MachineSpec,
        kvm: File,
        userfaultfd: Option<&File>,
        host: &HostSide,
    ) -> Result<Self, Error> {
        // What neither KVM nor the layout would refuse by itself.
        if !(1..=layout::MAX_VCPUS).contains(&machine.vcpus) {
            return Err(Error::Refused("a machine has 1 to 32 vCPUs"));
        }
        let queues = devices::queues(&machine);
        if queues.len() > layout::DEVICE_IRQS.len() {
            return Err(Error::Refused("too many devices"));
        }
        if machine.paged && machine.balloon {
            return Err(Error::Refused(
                "a paged VM has no balloon: what that gives up is no longer the pager's to fill",
            ));
        }
        let pager = match (machine.paged, userfaultfd) {
            (false, _) => None,
            (true, Some(device)) => Some(Prepared::new(device)?),
            (true, None) => return Err(Error::Refused("a paged machine needs /dev/userfaultfd")),
        };
        let kvm = open_kvm(kvm);
        let room = Room::reserve(machine.memory_mib)?;
        let fd = create_vm(&kvm, &room)?;

        let msrs = kvm.get_msr_index_list().ioctl("KVM_GET_MSR_INDEX_LIST")?.as_slice().to_vec();
        let supported = cpuid::supported(&kvm)?;
        let (mut vcpus, mut traits, mut tsc_offset) = (Vec::new(), None, false);
        for id in 0..machine.vcpus {
            let vcpu = fd.create_vcpu(u64::from(id)).ioctl("KVM_CREATE_VCPU")?;
            if traits.is_none() {
                traits = Some(HostTraits::of(&kvm, &supported, &vcpu)?);
                tsc_offset = Offset::is_kept(&vcpu)?;
            }
            let cpuid = cpuid::for_vcpu(&supported, &kvm, id, machine.vcpus);
            let stopped = host.stopped.try_clone().host("dup of an eventfd")?;
            vcpus.push(Vcpu::spawn(id, vcpu, &cpuid, Surroundings { stops: host.stops.clone(), stopped })?);
        }

        let serial = interrupt(&fd, layout::SERIAL_IRQ)?;
        let (mut interrupts, mut notifications) = (Vec::new(), Vec::new());
        for (device, (count, irq)) in queues.into_iter().zip(layout::DEVICE_IRQS).enumerate() {
            interrupts.push(interrupt(&fd, irq)?);
            for queue in 0..count {
                let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).host("eventfd")?;
                let register = devices::registers_of(device) + u64::from(VIRTIO_MMIO_QUEUE_NOTIFY);
                let value = u32::try_from(queue).unwrap_or_default();
                fd.register_ioevent(&event, &IoEventAddress::Mmio(register), value).ioctl("KVM_IOEVENTFD")?;
                notifications.push(Notification { event, device, queue });
            }
        }
        let host = traits.ok_or(Error::Refused("a machine has 1 to 32 vCPUs"))?;
        let extent = Extent { msrs, xsave_bytes: host.xsave_bytes(), tsc_offset };
        Ok(Self { fd, machine, host, room, vcpus, extent, serial, interrupts, notifications, foreseen: None, pager })
    }

    /// It will be restored to this, which stands ready from now on but for memory and devices. What time passes until the guest's first run does not
    /// pass for it ([`super::Vm::resume`]).
    pub(crate) fn foresee(&mut self, state: VmState) -> Result<(), Error> {
        state.check(&self.machine, &self.host, &IRQCHIPS)?;
        let put_in = if state.vcpus.iter().any(VcpuState::reads_memory) {
            None
        } else {
            Some(put_machine(&self.fd, &mut self.vcpus, &state)?)
        };
        self.foreseen = Some(Foreseen { state: Arc::new(state), put_in });
        Ok(())
    }
}

/// Puts in what KVM keeps of a state: vCPUs, interrupt controllers, timer and clock. Returns when.
pub(super) fn put_machine(vm: &VmFd, vcpus: &mut [Vcpu], state: &VmState) -> Result<Instant, Error> {
    let now = HostTsc::now();
    for (index, vcpu) in vcpus.iter_mut().enumerate() {
        vcpu.restore(state, index, now)?;
    }
    // After the vCPUs: what is pending here goes to a local APIC that must be there.
    for chip in &state.irqchips {
        vm.set_irqchip(chip).ioctl("KVM_SET_IRQCHIP")?;
    }
    vm.set_pit2(&state.pit).ioctl("KVM_SET_PIT2")?;
    vm.set_clock(&state.clock).ioctl("KVM_SET_CLOCK")?;
    Ok(Instant::now())
}

/// The version of KVM's API behind an open `/dev/kvm`; 12 on every kernel of the last fifteen years.
///
/// # Errors
/// [`Error::Refused`] where the file is something else.
pub fn kvm_version(file: File) -> Result<i32, Error> {
    match open_kvm(file).get_api_version() {
        version @ 0.. => Ok(version),
        _ => Err(Error::Refused("/dev/kvm does not answer KVM_GET_API_VERSION")),
    }
}

pub(crate) fn open_kvm(file: File) -> Kvm {
    // SAFETY: the descriptor is owned by nobody else, and the node passes `/dev/kvm` in this place; any other file fails the first ioctl.
    unsafe { Kvm::from_raw_fd(file.into_raw_fd()) }
}

/// The VM with its memory slot and interrupt controllers. The slot first: behind the controllers it would wait some 7 ms for an SRCU
/// grace period.
pub(crate) fn create_vm(kvm: &Kvm, room: &Room) -> Result<VmFd, Error> {
    let vm = kvm.create_vm().ioctl("KVM_CREATE_VM")?;
    let (userspace_addr, memory_size) = (room.addresses().start, room.size() as u64);
    let slot = kvm_userspace_memory_region { slot: 0, flags: 0, guest_phys_addr: 0, memory_size, userspace_addr };
    // SAFETY: whoever runs a guest in this VM keeps the room meanwhile: the bus that a vCPU thread holds, and the limit's only run.
    unsafe { vm.set_user_memory_region(slot) }.ioctl("KVM_SET_USER_MEMORY_REGION")?;
    vm.set_tss_address(layout::TSS).ioctl("KVM_SET_TSS_ADDR")?;
    vm.create_irq_chip().ioctl("KVM_CREATE_IRQCHIP")?;
    vm.create_pit2(kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() }).ioctl("KVM_CREATE_PIT2")?;
    Ok(vm)
}

fn interrupt(vm: &VmFd, line: u32) -> Result<EventFd, Error> {
    let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).host("eventfd")?;
    vm.register_irqfd(&event, line).ioctl("KVM_IRQFD")?;
    Ok(event)
}
