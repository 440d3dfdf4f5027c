//! The life of a VMM process: one epoll loop over the control socket, the guest's notifications and its vsock streams.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
};

use stasis_vmm_api::{Event, FromVmm, Reply, Request};
use vmm_sys_util::{
    epoll::{ControlOperation, Epoll, EpollEvent, EventSet},
    eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd},
};

use crate::{
    control::{Control, Received},
    error::{Error, Host},
    jail::{self, Role},
    vcpu,
    virtio::{Events, Watch},
    vm::{HostSide, Vm},
};

/// Tokens have the top bit set; without it, the number is the key of a vsock stream.
const TOKEN: u64 = 1 << 63;
const CONTROL: u64 = TOKEN;
const STOPPED: u64 = TOKEN + 1;
const NOTIFICATIONS: u64 = TOKEN + 2;
const EVENTS_AT_ONCE: usize = 64;

/// Serves requests from `control` until it closes. The calling thread is confined to the system calls that this needs, and
/// of no use for anything else afterwards.
///
/// # Errors
/// When the process itself can do no more: the control socket broke, or an essential call failed. Failures of requests are
/// answers, not errors.
pub fn serve(control: OwnedFd) -> Result<(), Error> {
    // A thread that panics leaves a VM in an unknown state: end it all, so that the node sees it at once.
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        default(info);
        std::process::abort();
    }));
    vcpu::install_kick_handler()?;
    jail::tame_allocator()?;
    let mut process = Process::new(control)?;
    jail::confine(Role::Building)?;
    process.run()
}

struct Process {
    control: Control,
    watcher: Arc<Watcher>,
    host: HostSide,
    stops: Receiver<stasis_vmm_api::Stop>,
    vm: Option<Vm>,
}

/// The epoll instance, as devices see it.
struct Watcher(Epoll);

impl Watcher {
    fn add(&self, fd: BorrowedFd<'_>, token: u64) -> Result<(), Error> {
        let event = EpollEvent::new(EventSet::IN, token);
        self.0.ctl(ControlOperation::Add, fd.as_raw_fd(), event).host("epoll_ctl")
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
    fn new(control: OwnedFd) -> Result<Self, Error> {
        let watcher = Arc::new(Watcher(Epoll::new().host("epoll_create")?));
        let stopped = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).host("eventfd")?;
        let (sender, stops) = mpsc::channel();
        watcher.add(control.as_fd(), CONTROL)?;
        // SAFETY: the descriptor stays open as long as `stopped`, which outlives this borrow.
        let stopped_fd = unsafe { BorrowedFd::borrow_raw(stopped.as_raw_fd()) };
        watcher.add(stopped_fd, STOPPED)?;
        let host = HostSide { watch: watcher.clone(), stops: sender, stopped };
        Ok(Self { control: Control::new(control), watcher, host, stops, vm: None })
    }

    fn run(&mut self) -> Result<(), Error> {
        let mut events = vec![EpollEvent::default(); EVENTS_AT_ONCE];
        loop {
            let count = match self.watcher.0.wait(-1, &mut events) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error).host("epoll_wait"),
            };
            for event in &events[..count] {
                match event.data() {
                    CONTROL => {
                        let Some(received) = self.control.receive()? else { return Ok(()) };
                        let reply =
                            self.handle(received).unwrap_or_else(|error| Reply::Failed { reason: error.chain() });
                        self.control.send(&FromVmm::Reply(reply), None)?;
                    }
                    STOPPED => self.report_stop()?,
                    token if token & TOKEN != 0 => {
                        if let Some(vm) = &self.vm {
                            vm.notified(usize::try_from(token - NOTIFICATIONS).unwrap_or(usize::MAX))?;
                        }
                    }
                    key => self.stream_ready(key, event.event_set())?,
                }
                self.report_accepted()?;
            }
        }
    }

    fn handle(&mut self, Received { request, files }: Received) -> Result<Reply, Error> {
        match request {
            Request::Boot(spec) => {
                let ([kvm, kernel], disks) = split(files)?;
                self.build(|host| Vm::boot(spec, kvm, kernel, disks, host))
            }
            Request::Restore(spec) => {
                let ([kvm, image, state], disks) = split(files)?;
                self.build(|host| Vm::restore(spec, kvm, image, &state, disks, host))
            }
            Request::Resume => self.vm()?.resume().map(|()| Reply::Done),
            Request::Pause => self.vm()?.pause().map(|()| Reply::Done),
            Request::Snapshot => {
                let ([image, state], _) = split(files)?;
                self.vm()?.snapshot(&image, state).map(Reply::Snapshotted)
            }
            Request::Connect { port } => {
                let ([stream], _) = split(files)?;
                self.vm()?.connect(OwnedFd::from(stream).into(), port).map(|()| Reply::Done)
            }
            Request::Console => Ok(Reply::Console { tail: self.vm()?.console() }),
        }
    }

    fn build(
        &mut self,
        make: impl FnOnce(&HostSide) -> Result<(Vm, stasis_vmm_api::Phases), Error>,
    ) -> Result<Reply, Error> {
        if self.vm.is_some() {
            return Err(Error::Refused("this process has a VM already"));
        }
        let (vm, phases) = make(&self.host)?;
        for (index, notification) in (0..).zip(&vm.notifications) {
            // SAFETY: the VM, which owns the eventfd, is kept until the process ends.
            let fd = unsafe { BorrowedFd::borrow_raw(notification.event.as_raw_fd()) };
            self.watcher.add(fd, NOTIFICATIONS + index)?;
        }
        self.vm = Some(vm);
        // No guest has run yet. From here on nothing is built and no thread started.
        jail::confine_or_abort(Role::Loop);
        Ok(Reply::Built(phases))
    }

    fn vm(&mut self) -> Result<&mut Vm, Error> {
        self.vm.as_mut().ok_or(Error::Refused("this process has no VM yet"))
    }

    fn stream_ready(&mut self, key: u64, events: EventSet) -> Result<(), Error> {
        let Some(vm) = &self.vm else { return Ok(()) };
        let hangup = events.intersects(EventSet::HANG_UP | EventSet::ERROR);
        let (read, write) = (hangup || events.contains(EventSet::IN), hangup || events.contains(EventSet::OUT));
        vm.stream_ready(key, Events { read, write, hangup })
    }

    fn report_accepted(&mut self) -> Result<(), Error> {
        let Some(vm) = &self.vm else { return Ok(()) };
        for (port, stream) in vm.take_accepted() {
            self.control.send(&FromVmm::Event(Event::GuestConnected { port }), Some(stream.as_fd()))?;
        }
        Ok(())
    }

    fn report_stop(&mut self) -> Result<(), Error> {
        // Only this loop reads the counter; an empty one has been reported already.
        let _ = self.host.stopped.read();
        let Some(vm) = &mut self.vm else { return Ok(()) };
        // One vCPU's stop ends the VM: what the others did after it is of no interest.
        match self.stops.try_iter().next() {
            Some(why) if vm.halt() => {
                self.control.send(&FromVmm::Event(Event::Stopped { why, console: vm.console() }), None)
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
