//! The machine: KVM's VM, its memory, vCPU threads and devices; built from a kernel or from a snapshot.

mod devices;

use std::{
    fs::File,
    io::ErrorKind,
    os::{
        fd::{FromRawFd, IntoRawFd},
        unix::net::UnixStream,
    },
    sync::{Arc, Mutex, mpsc::Sender},
    time::{Duration, Instant},
};

use kvm_bindings::{
    KVM_CLOCK_TSC_STABLE, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_PIT_SPEAKER_DUMMY,
    kvm_irqchip, kvm_pit_config, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use stasis_vmm_api::{BootSpec, MachineSpec, Phases, RestoreSpec, SnapshotReport, Stop};
use vmm_sys_util::eventfd::EventFd;

use self::devices::{Devices, Notification};
use crate::{
    boot,
    bus::{Bus, lock},
    console::{Console, ConsoleState},
    cpuid,
    error::{Error, Host, Ioctl},
    layout, memory,
    memory::GuestMemory,
    snapshot::VmState,
    vcpu::{self, Surroundings, Vcpu},
    virtio::{Events, Io, Outcome, Watch, vsock::Vsock},
};

const IRQCHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

/// A VM, paused or running.
pub(crate) struct Vm {
    fd: VmFd,
    machine: MachineSpec,
    /// The memory's file, where it is our own and can be written out.
    own_memory: Option<File>,
    vcpus: Vec<Vcpu>,
    bus: Arc<Bus>,
    vsock: usize,
    phase: Phase,
    /// One per device and queue: the guest's notifications.
    pub(crate) notifications: Vec<Notification>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Paused,
    Running,
    /// A vCPU has stopped for good, and so have the others.
    Stopped,
}

/// What the event loop gives a VM.
pub(crate) struct HostSide {
    pub(crate) watch: Arc<dyn Watch + Send + Sync>,
    pub(crate) stops: Sender<Stop>,
    pub(crate) stopped: EventFd,
}

impl Vm {
    /// Boots a kernel; the vCPUs do not run yet.
    pub(crate) fn boot(
        spec: BootSpec,
        kvm: File,
        mut kernel: File,
        disks: Vec<File>,
        host: &HostSide,
    ) -> Result<(Self, Phases), Error> {
        let mut clock = Stopwatch::start();
        check(&spec.machine)?;
        let kvm = open_kvm(kvm);
        let (memory, file) = memory::fresh(spec.machine.memory_mib)?;
        let line = format!("{}{}", spec.cmdline, devices::on_cmdline(&spec.machine));
        let entry = boot::load(&memory, &mut kernel, &line, spec.machine.vcpus)?;
        let in_memory = clock.lap();

        let fd = create_vm(&kvm, &memory)?;
        let vcpus = create_vcpus(&fd, &spec.machine)?;
        let supported = cpuid::supported(&kvm)?;
        for (id, vcpu) in (0..).zip(&vcpus) {
            let cpuid = cpuid::for_vcpu(&supported, &kvm, id, spec.machine.vcpus);
            vcpu.set_cpuid2(&cpuid).ioctl("KVM_SET_CPUID2")?;
        }
        if let Some(first) = vcpus.first() {
            boot::enter(&memory, first, entry)?;
        }
        let create = clock.lap();

        let mut vm = Self::assemble(fd, spec.machine, memory, disks, None, host)?;
        vm.own_memory = Some(file);
        vm.start_threads(&kvm, vcpus, host)?;
        Ok((vm, Phases { create, memory: in_memory, state: clock.lap() }))
    }

    /// Restores a snapshot; the vCPUs do not run yet.
    pub(crate) fn restore(
        spec: RestoreSpec,
        kvm: File,
        image: File,
        state: &File,
        disks: Vec<File>,
        host: &HostSide,
    ) -> Result<(Self, Phases), Error> {
        let mut clock = Stopwatch::start();
        check(&spec.machine)?;
        let state = VmState::read(state)?;
        state.check(&spec.machine, &IRQCHIPS)?;
        let kvm = open_kvm(kvm);
        let memory = memory::private(image, spec.machine.memory_mib)?;
        let in_memory = clock.lap();

        let fd = create_vm(&kvm, &memory)?;
        let vcpus = create_vcpus(&fd, &spec.machine)?;
        let create = clock.lap();

        for (vcpu, saved) in vcpus.iter().zip(&state.vcpus) {
            vcpu::restore(vcpu, saved)?;
        }
        for chip in &state.irqchips {
            fd.set_irqchip(chip).ioctl("KVM_SET_IRQCHIP")?;
        }
        fd.set_pit2(&state.pit).ioctl("KVM_SET_PIT2")?;
        fd.set_clock(&state.clock).ioctl("KVM_SET_CLOCK")?;
        let mut vm = Self::assemble(fd, spec.machine, memory, disks, Some(&state.console), host)?;
        if vm.bus.virtio.len() != state.devices.len() {
            return Err(Error::Snapshot("another number of devices".into()));
        }
        for (device, saved) in vm.bus.virtio.iter().zip(&state.devices) {
            lock(device).restore(saved)?;
        }
        vm.start_threads(&kvm, vcpus, host)?;
        Ok((vm, Phases { create, memory: in_memory, state: clock.lap() }))
    }

    /// The console, and the devices on their lines and registers.
    fn assemble(
        fd: VmFd,
        machine: MachineSpec,
        memory: GuestMemory,
        files: Vec<File>,
        console: Option<&ConsoleState>,
        host: &HostSide,
    ) -> Result<Self, Error> {
        let serial = devices::interrupt(&fd, layout::SERIAL_IRQ)?;
        let Devices { virtio, notifications, vsock } = Devices::assemble(&fd, &machine, &memory, files, host)?;
        let bus = Arc::new(Bus { console: Mutex::new(Console::new(&serial, console)?), virtio, memory });
        Ok(Self { fd, machine, own_memory: None, vcpus: Vec::new(), bus, vsock, phase: Phase::Paused, notifications })
    }

    fn start_threads(&mut self, kvm: &Kvm, vcpus: Vec<VcpuFd>, host: &HostSide) -> Result<(), Error> {
        let msr_indices: Arc<[u32]> = kvm.get_msr_index_list().ioctl("KVM_GET_MSR_INDEX_LIST")?.as_slice().into();
        for (id, fd) in (0..).zip(vcpus) {
            let around = Surroundings {
                bus: Arc::clone(&self.bus),
                msr_indices: Arc::clone(&msr_indices),
                stops: host.stops.clone(),
                stopped: host.stopped.try_clone().host("dup of an eventfd")?,
            };
            self.vcpus.push(Vcpu::spawn(id, fd, around)?);
        }
        Ok(())
    }

    /// Lets the vCPUs run.
    pub(crate) fn resume(&mut self) -> Result<(), Error> {
        self.refuse_if_stopped()?;
        self.wake_devices()?;
        self.phase = Phase::Running;
        self.vcpus.iter().try_for_each(Vcpu::run)
    }

    /// Stops the vCPUs and waits until they have.
    pub(crate) fn pause(&mut self) -> Result<(), Error> {
        self.refuse_if_stopped()?;
        self.pause_all()?;
        self.phase = Phase::Paused;
        Ok(())
    }

    /// A vCPU has stopped for good: stops the others too. Returns whether this is news.
    pub(crate) fn halt(&mut self) -> bool {
        let news = self.phase != Phase::Stopped;
        self.phase = Phase::Stopped;
        let _ = self.pause_all(); // the one that has stopped cannot be paused
        news
    }

    /// Every vCPU that can be, even if another cannot.
    fn pause_all(&self) -> Result<(), Error> {
        let pausing: Vec<_> = self.vcpus.iter().map(Vcpu::pause).collect();
        let mut outcome = Ok(());
        for paused in pausing {
            match paused {
                // The thread answers by dropping its end.
                Ok(paused) => drop(paused.recv()),
                Err(error) => outcome = Err(error),
            }
        }
        outcome
    }

    fn refuse_if_stopped(&self) -> Result<(), Error> {
        if self.phase == Phase::Stopped { Err(Error::Refused("the guest has stopped for good")) } else { Ok(()) }
    }

    /// Writes memory and state of a paused VM.
    pub(crate) fn snapshot(&self, image: &File, mut to: File) -> Result<SnapshotReport, Error> {
        match self.phase {
            Phase::Paused => {}
            Phase::Running => return Err(Error::Refused("a running VM cannot be snapshotted: pause it first")),
            Phase::Stopped => return Err(Error::Refused("the guest has stopped for good")),
        }
        let own = self.own_memory.as_ref().ok_or(Error::Refused("only a booted VM can be snapshotted"))?;
        let mut clock = Stopwatch::start();
        self.serve_all()?;
        self.state()?.write(&mut to)?;
        let state = clock.lap();
        let written_bytes = memory::write_image(own, image)?;
        Ok(SnapshotReport { written_bytes, memory: clock.lap(), state })
    }

    fn state(&self) -> Result<VmState, Error> {
        // Devices first: the one that refuses a snapshot now (vsock) does so before anything else is read.
        let devices = self.bus.virtio.iter().map(|device| lock(device).save()).collect::<Result<_, _>>()?;
        let mut clock = self.fd.get_clock().ioctl("KVM_GET_CLOCK")?;
        // KVM_SET_CLOCK takes no flag that says how the value was read.
        clock.flags &= !KVM_CLOCK_TSC_STABLE;
        clock.flags &= !(kvm_bindings::KVM_CLOCK_REALTIME | kvm_bindings::KVM_CLOCK_HOST_TSC);
        Ok(VmState {
            machine: self.machine.clone(),
            vcpus: self.vcpus.iter().map(Vcpu::save).collect::<Result<_, _>>()?,
            irqchips: IRQCHIPS.into_iter().map(|id| self.irqchip(id)).collect::<Result<_, _>>()?,
            pit: self.fd.get_pit2().ioctl("KVM_GET_PIT2")?,
            clock,
            console: lock(&self.bus.console).state(),
            devices,
        })
    }

    fn irqchip(&self, chip_id: u32) -> Result<kvm_irqchip, Error> {
        let mut chip = kvm_irqchip { chip_id, ..Default::default() };
        self.fd.get_irqchip(&mut chip).ioctl("KVM_GET_IRQCHIP")?;
        Ok(chip)
    }

    /// Connects a stream to a vsock port of the guest.
    pub(crate) fn connect(&self, stream: UnixStream, port: u32) -> Result<(), Error> {
        self.with_vsock(|vsock, io| vsock.connect(stream, port, io))
    }

    /// What was watched for on a vsock stream has happened.
    pub(crate) fn stream_ready(&self, key: u64, events: Events) -> Result<(), Error> {
        self.with_vsock(|vsock, io| vsock.stream_ready(key, events, io))
    }

    fn with_vsock(
        &self,
        work: impl FnOnce(&mut Vsock, &mut Io<'_>) -> Result<Outcome, virtio_queue::Error>,
    ) -> Result<(), Error> {
        let more = lock(&self.bus.virtio[self.vsock]).drive(|device, io| match device.as_vsock() {
            Some(vsock) => work(vsock, io),
            None => Ok(Outcome::default()),
        })?;
        if more { self.again(self.vsock) } else { Ok(()) }
    }

    /// Connections that the guest has made.
    pub(crate) fn take_accepted(&self) -> Vec<(u32, UnixStream)> {
        lock(&self.bus.virtio[self.vsock]).device().as_vsock().map(Vsock::take_accepted).unwrap_or_default()
    }

    /// Handles the notification with this index, if it is one. Returns whether it was.
    pub(crate) fn notified(&self, index: usize) -> Result<bool, Error> {
        let Some(notification) = self.notifications.get(index) else { return Ok(false) };
        match notification.event.read() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            other => other.host("read of a notification's eventfd")?,
        };
        if lock(&self.bus.virtio[notification.device]).notified(notification.queue)? {
            notification.again()?;
        }
        Ok(true)
    }

    /// Serves what the guest asked for before it was paused: a notification that waits is in no snapshot, and its request would never be
    /// answered. A paused guest asks for nothing new, so this ends.
    fn serve_all(&self) -> Result<(), Error> {
        let mut any = true;
        while any {
            any = false;
            for index in 0..self.notifications.len() {
                any |= self.notified(index)?;
            }
        }
        Ok(())
    }

    /// The console's tail.
    pub(crate) fn console(&self) -> String {
        lock(&self.bus.console).ring().tail()
    }
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

/// What neither KVM nor the layout would refuse by itself.
fn check(machine: &MachineSpec) -> Result<(), Error> {
    match machine.vcpus {
        1..=layout::MAX_VCPUS => Ok(()),
        _ => Err(Error::Refused("a machine has 1 to 32 vCPUs")),
    }
}

fn open_kvm(file: File) -> Kvm {
    // SAFETY: the descriptor is owned by nobody else, and the node passes `/dev/kvm` in this place; any other file fails the first ioctl.
    unsafe { Kvm::from_raw_fd(file.into_raw_fd()) }
}

/// The VM with its memory and interrupt controllers. Memory first: behind the controllers it would wait some 7 ms for an SRCU grace period.
fn create_vm(kvm: &Kvm, memory: &GuestMemory) -> Result<VmFd, Error> {
    let vm = kvm.create_vm().ioctl("KVM_CREATE_VM")?;
    let (userspace_addr, memory_size) = memory::host_range(memory)?;
    let slot = kvm_userspace_memory_region { slot: 0, flags: 0, guest_phys_addr: 0, memory_size, userspace_addr };
    // SAFETY: the range is a mapping that `Bus::memory` keeps as long as the vCPU threads, which is as long as the process.
    unsafe { vm.set_user_memory_region(slot) }.ioctl("KVM_SET_USER_MEMORY_REGION")?;
    vm.set_tss_address(layout::TSS).ioctl("KVM_SET_TSS_ADDR")?;
    vm.create_irq_chip().ioctl("KVM_CREATE_IRQCHIP")?;
    vm.create_pit2(kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() }).ioctl("KVM_CREATE_PIT2")?;
    Ok(vm)
}

fn create_vcpus(vm: &VmFd, machine: &MachineSpec) -> Result<Vec<VcpuFd>, Error> {
    (0..machine.vcpus).map(|id| vm.create_vcpu(u64::from(id)).ioctl("KVM_CREATE_VCPU")).collect()
}

struct Stopwatch(Instant);

impl Stopwatch {
    fn start() -> Self {
        Self(Instant::now())
    }

    fn lap(&mut self) -> Duration {
        let lap = self.0.elapsed();
        self.0 += lap;
        lap
    }
}

#[cfg(test)]
mod tests;
