//! The machine: KVM's VM, its memory, vCPU threads and devices; built from a kernel or from a snapshot.
//!
//! ```text
//!               boot               snapshot
//!  Shell ──┬───────────▶ paused ⇄ running ──▶ stopped
//!          │ restore       ▲ │      │
//!          └───────────────┘ └rewind┘ (of a restored one)
//! ```

mod devices;
mod live;
mod shell;
mod wake;

use std::{
    fs::File,
    io::Write,
    mem,
    os::unix::net::UnixStream,
    sync::{Arc, Mutex, mpsc::Sender},
    time::{Duration, Instant},
};

use kvm_bindings::{
    KVM_CLOCK_TSC_STABLE, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip,
};
use kvm_ioctls::VmFd;
use stasis_guest_wire::page::WakePage;
use stasis_vmm_api::{MachineSpec, Phases, RewindReport, SnapshotReport, Stop};
use vmm_sys_util::eventfd::EventFd;

pub(crate) use live::Live;
pub use shell::kvm_version;
use shell::{Foreseen, put_machine};
pub(crate) use shell::{Notification, Shell, create_vm, open_kvm};
pub(crate) use wake::{Bell, was_rung};

use crate::{
    boot::{self, flat},
    bus::{Bus, lock},
    console::Console,
    error::{Error, Host, Ioctl},
    memory,
    memory::{Flush, GuestMemory, Paged, Pagemap, WorkingSet},
    snapshot::VmState,
    traits::HostTraits,
    vcpu::{Extent, HostTsc, Lasts, Pausing, Vcpu},
    virtio::{Events, Io, Outcome, Transport, TransportState, Watch, vsock::Vsock},
};

/// How far a VM that stands ready may run ahead of the snapshot's time.
const CLOCKS_STALE: Duration = Duration::from_millis(2);
const IRQCHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

/// A VM, paused or running.
pub(crate) struct Vm {
    fd: VmFd,
    machine: MachineSpec,
    traits: HostTraits,
    contents: Contents,
    vcpus: Vec<Vcpu>,
    extent: Extent,
    bus: Arc<Bus>,
    vsock: usize,
    phase: Phase,
    working_set: WorkingSet,
    /// Nothing has run since the restore or the last rewind.
    is_pristine: bool,
    /// When the snapshot's time was put in.
    clocks_set: Instant,
    /// Where the guest of a booted VM waits for its first order.
    wake_page: Option<WakePage>,
    /// An order lies in the wake page, and has not been answered.
    is_ordered: bool,
    /// It was resumed, and its vCPUs have not been told to run.
    is_to_run: bool,
    /// One per device and queue: the guest's notifications.
    pub(crate) notifications: Vec<Notification>,
    /// Behind all that uses memory.
    paged: Option<Paged>,
}

/// What the guest's memory was made from.
enum Contents {
    /// A boot: all of it is in this file.
    Booted(File),
    /// A snapshot, whose state beside memory is kept for a rewind.
    Restored(Arc<VmState>),
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
    pub(crate) stops: Sender<(usize, Stop)>,
    pub(crate) stopped: EventFd,
    /// A guest has rung.
    pub(crate) rung: EventFd,
}

impl Vm {
    /// Boots a kernel; the vCPUs do not run yet.
    pub(crate) fn boot(
        shell: Shell,
        cmdline: &str,
        mut kernel: File,
        mut initrd: Option<File>,
        disks: Vec<File>,
        host: &HostSide,
    ) -> Result<(Self, Phases), Error> {
        let mut clock = Stopwatch::start();
        if shell.foreseen.is_some() {
            return Err(Error::Refused("the shell was prepared to restore a snapshot"));
        }
        let machine = &shell.machine;
        if machine.paged {
            return Err(Error::Refused("a pager fills the memory of a restored VM only"));
        }
        let file = memory::fresh_file(machine.memory_mib)?;
        let memory = shell.room.map_shared(&file)?;
        let line = format!("{cmdline}{}", devices::on_cmdline(machine));
        let first = shell.vcpus.first().ok_or(Error::Refused("a machine has 1 to 32 vCPUs"))?;
        if flat::is_flat(&kernel) {
            flat::load(&memory, &mut kernel)?;
            first.with(|fd| flat::enter(&memory, fd))?;
        } else {
            let entry =
                boot::load(&memory, &mut kernel, initrd.as_mut(), &line, machine.vcpus, &devices::found(machine))?;
            first.with(|fd| boot::enter(&memory, fd, entry))?;
        }
        let in_memory = clock.lap();
        let vm = Self::assemble(shell, memory, Contents::Booted(file), disks, host)?;
        Ok((vm, Phases { memory: in_memory, state: clock.lap() }))
    }

    /// Restores the snapshot that the shell was prepared for; the vCPUs do not run yet.
    pub(crate) fn restore(
        mut shell: Shell,
        image: &File,
        mut disks: Vec<File>,
        host: &HostSide,
    ) -> Result<(Self, Phases), Error> {
        let mut clock = Stopwatch::start();
        let Foreseen { state, put_in } =
            shell.foreseen.take().ok_or(Error::Refused("the shell was prepared to boot a kernel"))?;
        let memory = shell.room.map_private(image)?;
        let paged = match shell.pager.take() {
            Some(_) if disks.is_empty() => return Err(Error::Refused("a paged machine needs its pager's socket")),
            Some(prepared) => Some(prepared.fill(&shell.room, disks.remove(0).into())?),
            None => None,
        };
        let in_memory = clock.lap();
        let mut vm = Self::assemble(shell, memory, Contents::Restored(Arc::clone(&state)), disks, host)?;
        vm.paged = paged;
        vm.put_devices(&state)?;
        vm.clocks_set = match put_in {
            Some(at) => at,
            None => put_machine(&vm.fd, &mut vm.vcpus, &state)?,
        };
        Ok((vm, Phases { memory: in_memory, state: clock.lap() }))
    }

    /// Gives a shell its devices.
    fn assemble(
        shell: Shell,
        memory: GuestMemory,
        contents: Contents,
        files: Vec<File>,
        host: &HostSide,
    ) -> Result<Self, Error> {
        let Shell {
            fd,
            machine,
            host: traits,
            room,
            vcpus,
            extent,
            serial,
            interrupts,
            notifications,
            foreseen: _,
            pager: _,
        } = shell;
        let virtio = devices::assemble(&machine, &memory, files, interrupts, host)?;
        let vsock = machine.disks.len();
        let bell = Bell::new(host.rung.try_clone().host("dup of an eventfd")?);
        let bus = Arc::new(Bus { console: Mutex::new(Console::new(serial)), virtio, memory, room, bell });
        Ok(Self {
            fd,
            machine,
            traits,
            contents,
            vcpus,
            extent,
            bus,
            vsock,
            phase: Phase::Paused,
            working_set: WorkingSet::default(),
            is_pristine: true,
            clocks_set: Instant::now(),
            wake_page: None,
            is_ordered: false,
            is_to_run: false,
            notifications,
            paged: None,
        })
    }

    /// Puts what the devices have of a state into those of this paused VM, whether it is fresh or used.
    fn put_devices(&self, state: &VmState) -> Result<(), Error> {
        if self.bus.virtio.len() != state.devices.len() {
            return Err(Error::Snapshot("another number of devices".into()));
        }
        lock(&self.bus.console).restore(&state.console)?;
        for (device, saved) in self.bus.virtio.iter().zip(&state.devices) {
            lock(device).restore(saved)?;
        }
        Ok(())
    }

    /// Makes a used VM what it was when it had just been restored: memory, devices, interrupt controllers, clock and vCPUs. Disks are the
    /// caller's to put back. After a failure the VM is of no more use.
    pub(crate) fn rewind(&mut self, pagemap: &Pagemap) -> Result<RewindReport, Error> {
        let Contents::Restored(state) = &self.contents else {
            return Err(Error::Refused("only a restored VM can be rewound"));
        };
        let state = Arc::clone(state);
        let mut clock = Stopwatch::start();
        self.pause(Lasts::Long)?;
        // Whatever goes wrong from here on leaves neither the used VM nor a pristine one.
        self.phase = Phase::Stopped;
        for notification in &self.notifications {
            notification.take()?;
        }
        self.no_order();
        self.take_memory_back()?;
        let room = &self.bus.room;
        let dirty = pagemap.private_pages(room.addresses())?;
        room.drop_private(&dirty)?;
        if !self.is_pristine {
            self.working_set.end_of_life(&dirty);
        }
        let memory = clock.lap();
        self.put_devices(&state)?;
        self.clocks_set = put_machine(&self.fd, &mut self.vcpus, &state)?;
        self.phase = Phase::Paused;
        self.is_pristine = true;
        let dirty_bytes = dirty.iter().map(|range| range.end - range.start).sum();
        Ok(RewindReport { dirty_bytes, memory, state: clock.lap() })
    }

    /// Lets the vCPUs run, if they do not.
    pub(crate) fn resume(&mut self) -> Result<(), Error> {
        self.refuse_if_stopped()?;
        if self.phase == Phase::Running {
            return Ok(());
        }
        if self.is_pristine && self.clocks_set.elapsed() > CLOCKS_STALE {
            self.set_clocks()?;
        }
        self.wake_devices()?;
        self.phase = Phase::Running;
        self.is_to_run = true;
        Ok(())
    }

    /// Has the vCPUs of a resumed VM run, if they were not told to. They come behind the answer: whoever waits for it could otherwise have to wait for
    /// a processor until the guest lets one go, which took 2 ms on two of them.
    pub(crate) fn let_run(&mut self) -> Result<(), Error> {
        let due = mem::take(&mut self.is_to_run);
        if due { self.vcpus.iter().try_for_each(|vcpu| vcpu.run(&self.bus)) } else { Ok(()) }
    }

    /// A life begins at the snapshot's time, however long the VM has stood ready since its clocks were put back.
    fn set_clocks(&self) -> Result<(), Error> {
        let Contents::Restored(state) = &self.contents else { return Ok(()) };
        let now = HostTsc::now();
        for (index, vcpu) in self.vcpus.iter().enumerate() {
            vcpu.restore_time(state, index, now)?;
        }
        self.fd.set_clock(&state.clock).ioctl("KVM_SET_CLOCK")
    }

    /// A life has begun: makes the pages that it will write writable, beside the running guest.
    pub(crate) fn warm(&mut self) {
        let begins = self.phase == Phase::Running && mem::take(&mut self.is_pristine);
        if begins && let Err(error) = self.bus.room.populate(self.working_set.ahead()) {
            // The guest's own faults do the same, later and for more.
            tracing::warn!(error = error.chain(), "the working set cannot be populated");
        }
    }

    /// Its vCPUs run.
    pub(crate) fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    /// Stops the vCPUs and waits until they have.
    pub(crate) fn pause(&mut self, lasts: Lasts) -> Result<(), Error> {
        self.refuse_if_stopped()?;
        Self::pause_each(self.vcpus.iter(), lasts)?;
        self.phase = Phase::Paused;
        Ok(())
    }

    /// A vCPU has stopped for good: stops the others too. Returns whether this is news.
    pub(crate) fn halt(&mut self, stopped: usize) -> bool {
        let news = self.phase != Phase::Stopped;
        self.phase = Phase::Stopped;
        let others = self.vcpus.iter().enumerate().filter(|(index, _)| *index != stopped);
        // One that has stopped too cannot be paused, and need not be.
        let _ = Self::pause_each(others.map(|(_, vcpu)| vcpu), Lasts::Long);
        news
    }

    /// Every one that can be, even if another cannot.
    fn pause_each<'a>(vcpus: impl Iterator<Item = &'a Vcpu>, lasts: Lasts) -> Result<(), Error> {
        let pausing: Vec<_> = vcpus.map(|vcpu| vcpu.pause(lasts)).collect();
        pausing.into_iter().map(|pausing| pausing.map(Pausing::wait)).fold(Ok(()), Result::and)
    }

    fn refuse_if_stopped(&self) -> Result<(), Error> {
        if self.phase == Phase::Stopped { Err(Error::Refused("the guest has stopped for good")) } else { Ok(()) }
    }

    /// Writes memory and state of a paused VM.
    pub(crate) fn snapshot(&self, image: &File, mut to: File, pagemap: &Pagemap) -> Result<SnapshotReport, Error> {
        match self.phase {
            _ if self.paged.is_some() => {
                return Err(Error::Refused(
                    "a VM whose memory a pager fills cannot be snapshotted: not all of it is there",
                ));
            }
            Phase::Paused => {}
            Phase::Running => return Err(Error::Refused("a running VM cannot be snapshotted: pause it first")),
            Phase::Stopped => return Err(Error::Refused("the guest has stopped for good")),
        }
        let mut clock = Stopwatch::start();
        self.serve_all()?;
        let save = match &self.contents {
            // A template's: whoever is restored from it starts without connections, and its guest must know.
            Contents::Booted(_) => Transport::save,
            // One that goes on where it is now: a connection may be about to end, and a guest that stands still cannot end it.
            Contents::Restored(_) => Transport::save_cut,
        };
        let bytes = self.state(save)?.encode()?;
        to.write_all(&bytes).host("write of the VM's state")?;
        // One wait for both: what the first one makes the disk do for its file's metadata, it does for the other's too.
        let (mut of_state, mut of_image) = (Flush::of(&to), Flush::of(image));
        of_state.wrote(0..bytes.len() as u64)?;
        of_state.push()?;
        let state = clock.lap();
        let written_bytes = match &self.contents {
            Contents::Booted(own) => memory::write_image(own, image, &mut of_image)?,
            Contents::Restored(_) => {
                let mut changed = self.given_up();
                let room = self.bus.room.addresses();
                let private = pagemap.private_pages(room.clone())?;
                changed.extend(private.iter().map(|range| range.start - room.start..range.end - room.start));
                memory::write_changes(&self.bus.memory, &changed, image, Some(&mut of_image))?
            }
        };
        of_image.push()?;
        of_image.finish()?;
        of_state.finish()?;
        Ok(SnapshotReport { written_bytes, memory: clock.lap(), state })
    }

    fn state(&self, save: impl Fn(&Transport) -> Result<TransportState, Error>) -> Result<VmState, Error> {
        let restored = match &self.contents {
            Contents::Restored(state) => Some(state),
            Contents::Booted(_) => None,
        };
        let vcpu =
            |(index, vcpu): (usize, &Vcpu)| vcpu.save(&self.extent, restored.and_then(|state| state.vcpus.get(index)));
        // Devices first: the one that refuses a snapshot now (vsock) does so before anything else is read.
        let devices = self.bus.virtio.iter().map(|device| save(&lock(device))).collect::<Result<_, _>>()?;
        let mut clock = self.fd.get_clock().ioctl("KVM_GET_CLOCK")?;
        // KVM_SET_CLOCK takes no flag that says how the value was read.
        clock.flags &= !KVM_CLOCK_TSC_STABLE;
        clock.flags &= !(kvm_bindings::KVM_CLOCK_REALTIME | kvm_bindings::KVM_CLOCK_HOST_TSC);
        Ok(VmState {
            machine: self.machine.clone(),
            host: self.traits.clone(),
            taken_at: HostTsc::now(),
            vcpus: self.vcpus.iter().enumerate().map(vcpu).collect::<Result<_, _>>()?,
            irqchips: IRQCHIPS.into_iter().map(|id| self.irqchip(id)).collect::<Result<_, _>>()?,
            pit: self.fd.get_pit2().ioctl("KVM_GET_PIT2")?,
            clock,
            console: lock(&self.bus.console).state(),
            devices,
            wake_page: self.wake_page(),
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
        if !notification.take()? {
            return Ok(false);
        }
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
