//! The life of a VMM process: one epoll loop over the control socket, the guest's notifications, its vsock streams and its
//! devices' own sources (TAPs, timers).

mod owner;

use std::{
    fs::File,
    io, mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
};

use stasis_guest_wire::page::WakePage;
use stasis_vmm_api::{Event, FromVmm, LiveReport, MachineSpec, Reply, Request};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
};

use self::owner::{Heard, Owner};
use crate::{
    control::{Control, Received},
    error::{Error, Host},
    jail::{self, Role},
    memory::Pagemap,
    snapshot::VmState,
    uffd::Uffd,
    vcpu,
    virtio::{Events, Watch, watch::source_of},
    vm::{HostSide, Live, Shell, Vm, was_rung},
};

/// Tokens have the top bit set; without it, the number is the key of a vsock stream or of a device's own source.
const TOKEN: u64 = 1 << 63;
const CONTROL: u64 = TOKEN;
const STOPPED: u64 = TOKEN + 1;
const NEXT_OWNER: u64 = TOKEN + 2;
const RUNG: u64 = TOKEN + 3;
const NOTIFICATIONS: u64 = TOKEN + 4;
const EVENTS_AT_ONCE: usize = 64;
const SPOILT: Error = Error::Refused("this process could not make a VM, and can make no other");
const NO_VM: Error = Error::Refused("this process has no VM yet");

/// Serves requests from `control` until it closes, or those of later owners if the VM is kept. Once it has prepared a shell, the calling
/// thread is confined to the system calls that this needs, and of no use for anything else.
///
/// # Errors
/// When the process itself can do no more: the control socket broke, or an essential call failed. Failures of requests are
/// answers, not errors.
pub fn serve(control: OwnedFd, pagemap: Pagemap) -> Result<(), Error> {
    // A thread that panics leaves a VM in an unknown state: end it all, so that the node sees it at once.
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        default(info);
        std::process::abort();
    }));
    vcpu::install_kick_handler()?;
    jail::tame_allocator()?;
    let mut process = Process::new(control, pagemap)?;
    process.run()
}

struct Process {
    owner: Owner,
    watcher: Arc<Watcher>,
    host: HostSide,
    pagemap: Pagemap,
    /// None on a kernel without what live snapshots need.
    uffd: Option<Uffd>,
    live: Option<Live>,
    stops: Receiver<(usize, stasis_vmm_api::Stop)>,
    /// How the guest ended, for owners to come.
    stop: Option<Event>,
    machine: Machine,
}

/// What there is of the VM.
enum Machine {
    None,
    Shell(Box<Shell>),
    /// The shell is spent, but no VM came of it.
    Spoilt,
    Vm(Box<Vm>),
}

/// The epoll instance, as devices see it.
struct Watcher(Epoll);

impl Watcher {
    fn add(&self, fd: BorrowedFd<'_>, token: u64) -> Result<(), Error> {
        let event = EpollEvent::new(EventSet::IN, token);
        self.0.ctl(ControlOperation::Add, fd.as_raw_fd(), event).host("epoll_ctl")
    }

    fn remove(&self, fd: BorrowedFd<'_>) -> Result<(), Error> {
        self.0.ctl(ControlOperation::Delete, fd.as_raw_fd(), EpollEvent::default()).host("epoll_ctl")
    }
}

impl Watch for Watcher {
    fn watch(&self, fd: BorrowedFd<'_>, key: u64, events: Events) -> io::Result<()> {
        let mut set = EventSet::empty(); // epoll tells of a hang-up in any case
        set.set(EventSet::IN, events.read);
        set.set(EventSet::OUT, events.write);
        let event = EpollEvent::new(set, key);
        if events == Events::NONE {
            return self.0.ctl(ControlOperation::Delete, fd.as_raw_fd(), event);
        }
        match self.0.ctl(ControlOperation::Modify, fd.as_raw_fd(), event) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                self.0.ctl(ControlOperation::Add, fd.as_raw_fd(), event)
            }
            other => other,
        }
    }
}

impl Process {
    fn new(control: OwnedFd, pagemap: Pagemap) -> Result<Self, Error> {
        let watcher = Arc::new(Watcher(Epoll::new().host("epoll_create")?));
        let stopped = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).host("eventfd")?;
        let (sender, stops) = mpsc::channel();
        watcher.add(control.as_fd(), CONTROL)?;
        // SAFETY: the descriptor stays open as long as `stopped`, which outlives this borrow.
        let stopped_fd = unsafe { BorrowedFd::borrow_raw(stopped.as_raw_fd()) };
        watcher.add(stopped_fd, STOPPED)?;
        let rung = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).host("eventfd")?;
        // SAFETY: as above.
        watcher.add(unsafe { BorrowedFd::borrow_raw(rung.as_raw_fd()) }, RUNG)?;
        let host = HostSide { watch: watcher.clone(), stops: sender, stopped, rung };
        let uffd = Uffd::write_protecting()
            .inspect_err(|error| tracing::debug!(error = error.chain(), "no live snapshots on this host"))
            .ok();
        let owner = Owner::new(Control::new(control));
        Ok(Self { owner, watcher, host, pagemap, uffd, live: None, stops, stop: None, machine: Machine::None })
    }

    fn run(&mut self) -> Result<(), Error> {
        let mut events = vec![EpollEvent::default(); EVENTS_AT_ONCE];
        loop {
            // A live snapshot has always something to do, after what the guest waits for.
            let patience = if self.live.is_some() { 0 } else { -1 };
            let count = match self.watcher.0.wait(patience, &mut events) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error).host("epoll_wait"),
            };
            for event in &events[..count] {
                match event.data() {
                    CONTROL => match self.requests()? {
                        Heard::Left => self.await_owner()?,
                        Heard::End => return Ok(()),
                        Heard::Request(_) | Heard::Nothing => {}
                    },
                    NEXT_OWNER => self.welcome()?,
                    STOPPED => self.report_stop()?,
                    RUNG => self.report_said()?,
                    token if token & TOKEN != 0 => {
                        if let Machine::Vm(vm) = &self.machine {
                            vm.notified(usize::try_from(token - NOTIFICATIONS).unwrap_or(usize::MAX))?;
                        }
                    }
                    key => self.stream_ready(key, event.event_set())?,
                }
                self.report_accepted()?;
            }
            self.live_step()?;
        }
    }

    /// Does all that was asked for, then answers: an answer wakes the node, which would come between two requests that were sent together. Returns
    /// what was heard last.
    fn requests(&mut self) -> Result<Heard, Error> {
        let mut replies = Vec::new();
        let last = loop {
            match self.owner.listen()? {
                Heard::Request(received) => replies.push(self.handle(received).unwrap_or_else(|error| match &error {
                    Error::Incompatible { .. } => Reply::Incompatible { reason: error.chain() },
                    _ => Reply::Failed { reason: error.chain() },
                })),
                last => break last,
            }
        };
        for reply in replies {
            let adopts = matches!(reply, Reply::Adopted { .. });
            let with = if adopts { self.owner.files()? } else { Vec::new() };
            self.owner.tell(&FromVmm::Reply(reply), &with)?;
            if adopts && let Some(stop) = &self.stop {
                self.owner.tell(&FromVmm::Event(stop.clone()), &[])?;
            }
        }
        // Once the node knows of it.
        if let Machine::Vm(vm) = &mut self.machine {
            vm.let_run()?;
            vm.warm();
        }
        Ok(last)
    }

    /// The owner has left a VM that is kept: what was half done for it is given up.
    fn await_owner(&mut self) -> Result<(), Error> {
        self.live_end(Err(Error::Refused("whoever wanted the snapshot is gone")))?;
        match self.owner.awaited_at() {
            Some(listener) => self.watcher.add(listener, NEXT_OWNER),
            None => Ok(()),
        }
    }

    fn welcome(&mut self) -> Result<(), Error> {
        let Some(listener) = self.owner.awaited_at() else { return Ok(()) };
        // One at a time: others wait until this one has left.
        self.watcher.remove(listener)?;
        if !self.owner.welcome()? {
            return self.await_owner();
        }
        self.owner.socket().map_or(Ok(()), |socket| self.watcher.add(socket, CONTROL))
    }

    fn handle(&mut self, Received { request, files }: Received) -> Result<Reply, Error> {
        if let Machine::Vm(vm) = &mut self.machine {
            vm.let_run()?;
        }
        match request {
            Request::Prepare { machine, restores } => {
                let ([kvm], files) = split(files)?;
                self.prepare(machine, kvm, files, restores).map(|()| Reply::Done)
            }
            Request::Boot { cmdline, initrd } => {
                let ([kernel], mut disks) = split(files)?;
                if initrd && disks.is_empty() {
                    return Err(Error::Refused("no initial RAM disk came with the request"));
                }
                let initrd = initrd.then(|| disks.remove(0));
                self.build(|shell, host| Vm::boot(shell, &cmdline, kernel, initrd, disks, host))
            }
            Request::Restore => {
                let ([image], disks) = split(files)?;
                self.build(|shell, host| Vm::restore(shell, &image, disks, host))
            }
            Request::Rewind => match &self.machine {
                Machine::Vm(_) => self.rewind(),
                _ => Err(NO_VM),
            },
            Request::LiveSnapshot => self.live_begin(files),
            Request::AwaitRest => self.vm()?.await_rest().map(|()| Reply::Done),
            Request::WakePage { address, token } => {
                self.vm()?.waits_at(WakePage { address, token }).map(|()| Reply::Done)
            }
            Request::Order { text } => {
                let written = self.vm()?.order(&text.0)?;
                Ok(if written { Reply::Ordered } else { Reply::NoWakePage })
            }
            Request::Resume => self.vm()?.resume().map(|()| Reply::Done),
            Request::Pause => self.vm()?.pause(vcpu::Lasts::Long).map(|()| Reply::Done),
            Request::Snapshot => {
                let ([image, state], _) = split(files)?;
                match &self.machine {
                    Machine::Vm(vm) => vm.snapshot(&image, state, &self.pagemap).map(Reply::Snapshotted),
                    _ => Err(NO_VM),
                }
            }
            Request::Connect { port } => {
                let ([stream], _) = split(files)?;
                self.vm()?.connect(OwnedFd::from(stream).into(), port).map(|()| Reply::Done)
            }
            Request::Balloon { target_mib } => self.vm()?.set_balloon(target_mib).map(|()| Reply::Done),
            Request::Console => Ok(Reply::Console { tail: self.vm()?.console() }),
            Request::Keep => {
                self.vm()?;
                let ([listener], files) = split(files)?;
                self.owner.keep(listener.into(), files).map(|()| Reply::Done)
            }
            Request::Adopt => {
                self.owner.files()?;
                Ok(Reply::Adopted { running: self.vm()?.is_running() })
            }
        }
    }

    fn prepare(&mut self, machine: MachineSpec, kvm: File, mut files: Vec<File>, restores: bool) -> Result<(), Error> {
        match self.machine {
            Machine::None => {}
            Machine::Spoilt => return Err(SPOILT),
            Machine::Shell(_) | Machine::Vm(_) => return Err(Error::Refused("this process has a VM already")),
        }
        let state = if restores { files.pop() } else { None };
        if restores && state.is_none() {
            return Err(Error::Refused("no VM state came with the request"));
        }
        let mut shell = Shell::prepare(machine, kvm, files.first(), &self.host)?;
        for (index, notification) in (0..).zip(&shell.notifications) {
            // SAFETY: the eventfd stays open as long as the shell and then the VM; closed, it is in no epoll any more.
            let fd = unsafe { BorrowedFd::borrow_raw(notification.event.as_raw_fd()) };
            self.watcher.add(fd, NOTIFICATIONS + index)?;
        }
        // Nothing of a guest is there yet. From here on nothing of KVM's is made and no thread started.
        jail::confine_or_abort(Role::Loop);
        self.machine = Machine::Spoilt;
        if let Some(state) = state {
            shell.foresee(VmState::read(&state)?)?;
        }
        self.machine = Machine::Shell(Box::new(shell));
        Ok(())
    }

    /// Gives the shell its contents.
    fn build(
        &mut self,
        make: impl FnOnce(Shell, &HostSide) -> Result<(Vm, stasis_vmm_api::Phases), Error>,
    ) -> Result<Reply, Error> {
        let shell = match mem::replace(&mut self.machine, Machine::Spoilt) {
            Machine::Shell(shell) => shell,
            Machine::None => {
                self.machine = Machine::None;
                return Err(Error::Refused("this process has no shell yet"));
            }
            Machine::Spoilt => return Err(SPOILT),
            vm @ Machine::Vm(_) => {
                self.machine = vm;
                return Err(Error::Refused("this process has a VM already"));
            }
        };
        let (vm, phases) = make(*shell, &self.host)?;
        self.machine = Machine::Vm(Box::new(vm));
        Ok(Reply::Built(phases))
    }

    fn rewind(&mut self) -> Result<Reply, Error> {
        self.live_end(Err(Error::Refused("the VM was rewound")))?;
        match &mut self.machine {
            Machine::Vm(vm) => vm.rewind(&self.pagemap).map(Reply::Rewound),
            _ => Err(NO_VM),
        }
    }

    fn live_begin(&mut self, files: Vec<File>) -> Result<Reply, Error> {
        let Machine::Vm(vm) = &self.machine else { return Err(NO_VM) };
        if self.live.is_some() {
            return Err(Error::Refused("a live snapshot of this VM is under way already"));
        }
        let Some(uffd) = &self.uffd else {
            return Err(Error::Refused(
                "live snapshots need Linux 6.7 or newer (userfaultfd's asynchronous write protection)",
            ));
        };
        let ([image, state], clones) = split(files)?;
        self.live = Some(vm.live_begin(uffd, image, state, clones)?);
        Ok(Reply::Done)
    }

    /// The next slice of a live snapshot, if there is one.
    fn live_step(&mut self) -> Result<(), Error> {
        let (Some(live), Some(uffd), Machine::Vm(vm)) = (&mut self.live, &self.uffd, &mut self.machine) else {
            return Ok(());
        };
        match vm.live_step(live, &self.pagemap, uffd) {
            Ok(None) => Ok(()),
            Ok(Some(report)) => self.live_end(Ok(report)),
            Err(error) => self.live_end(Err(error)),
        }
    }

    /// Ends a live snapshot, if there is one, and tells the node.
    fn live_end(&mut self, outcome: Result<LiveReport, Error>) -> Result<(), Error> {
        let (Some(_), Some(uffd), Machine::Vm(vm)) = (self.live.take(), &self.uffd, &self.machine) else {
            return Ok(());
        };
        if let Err(error) = vm.live_end(uffd) {
            tracing::warn!(error = error.chain(), "the guest's memory stays write-protected, which slows it down");
        }
        let event = match outcome {
            Ok(report) => Event::LiveSnapshot(report),
            Err(error) => Event::LiveSnapshotFailed { reason: error.chain() },
        };
        self.owner.tell(&FromVmm::Event(event), &[])
    }

    fn vm(&mut self) -> Result<&mut Vm, Error> {
        match &mut self.machine {
            Machine::Vm(vm) => Ok(vm),
            _ => Err(NO_VM),
        }
    }

    fn stream_ready(&mut self, key: u64, events: EventSet) -> Result<(), Error> {
        let Machine::Vm(vm) = &self.machine else { return Ok(()) };
        if let Some((device, number)) = source_of(key) {
            return vm.source_ready(device, number);
        }
        let hangup = events.intersects(EventSet::HANG_UP | EventSet::ERROR);
        let (read, write) = (hangup || events.contains(EventSet::IN), hangup || events.contains(EventSet::OUT));
        vm.stream_ready(key, Events { read, write, hangup })
    }

    fn report_accepted(&mut self) -> Result<(), Error> {
        let Machine::Vm(vm) = &self.machine else { return Ok(()) };
        for (port, stream) in vm.take_accepted() {
            self.owner.tell(&FromVmm::Event(Event::GuestConnected { port }), &[stream.as_fd()])?;
        }
        Ok(())
    }

    fn report_said(&mut self) -> Result<(), Error> {
        let rung = was_rung(&self.host.rung)?;
        let Machine::Vm(vm) = &mut self.machine else { return Ok(()) };
        match if rung { vm.said()? } else { None } {
            Some(event) => self.owner.tell(&FromVmm::Event(event), &[]),
            None => Ok(()),
        }
    }

    fn report_stop(&mut self) -> Result<(), Error> {
        // Only this loop reads the counter; an empty one has been reported already.
        let _ = self.host.stopped.read();
        let Machine::Vm(vm) = &mut self.machine else { return Ok(()) };
        // One vCPU's stop ends the VM: what the others did after it is of no interest.
        match self.stops.try_iter().next() {
            Some((vcpu, why)) if vm.halt(vcpu) => {
                let stop = self.stop.insert(Event::Stopped { why, console: vm.console() });
                self.owner.tell(&FromVmm::Event(stop.clone()), &[])
            }
            _ => Ok(()),
        }
    }
}

/// The first `N` files by position, and the rest.
fn split<const N: usize>(mut files: Vec<File>) -> Result<([File; N], Vec<File>), Error> {
    if files.len() < N {
        return Err(Error::Refused("the request came with too few files"));
    }
    let rest = files.split_off(N);
    let first = files.try_into().map_err(|_| Error::Refused("the request came with too few files"))?;
    Ok((first, rest))
}
