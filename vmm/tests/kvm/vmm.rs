//! The node's end of the control socket, with `serve` in a thread or a jailed process behind it.

use std::{
    collections::VecDeque,
    fs::File,
    io::{IoSlice, IoSliceMut},
    os::{
        fd::{AsRawFd, OwnedFd, RawFd},
        unix::fs::FileExt,
    },
    thread,
    time::{Duration, Instant},
};

use nix::sys::{
    socket::{
        AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, recvmsg, sendmsg, setsockopt, socketpair,
        sockopt::ReceiveTimeout,
    },
    time::{TimeVal, TimeValLike},
};
use stasis_vmm_api::{Event, FromVmm, MAX_PACKET, MachineSpec, Reply, Request};

const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Vmm {
    socket: OwnedFd,
    /// Waits for its peaceful end.
    ended: Box<dyn FnOnce()>,
    events: VecDeque<Event>,
}

pub(crate) fn machine(vcpus: u8) -> MachineSpec {
    MachineSpec { memory_mib: 8, vcpus, ..MachineSpec::default() }
}

impl Vmm {
    pub(crate) fn start() -> Self {
        Self::over(|theirs| {
            let thread = thread::spawn(|| {
                let pagemap = stasis_vmm::Pagemap::of_this_process()?;
                stasis_vmm::serve(theirs, pagemap)
            });
            Box::new(|| thread.join().unwrap().unwrap())
        })
    }

    /// The client of what `start` starts at the other end of the socket. It returns what waits for its peaceful end.
    pub(crate) fn over(start: impl FnOnce(OwnedFd) -> Box<dyn FnOnce()>) -> Self {
        let (socket, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        setsockopt(&socket, ReceiveTimeout, &TimeVal::seconds(60)).unwrap();
        Self { socket, ended: start(theirs), events: VecDeque::new() }
    }

    /// One request and its answer.
    pub(crate) fn ask(&mut self, request: &Request, files: Vec<File>) -> Reply {
        self.send(request, files);
        self.reply()
    }

    /// A request whose answer [`Vmm::reply`] waits for.
    pub(crate) fn send(&self, request: &Request, files: Vec<File>) {
        let packet = serde_json::to_vec(request).unwrap();
        let fds: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&fds)];
        let rights = if fds.is_empty() { &[][..] } else { &rights };
        let parts = [IoSlice::new(&packet)];
        sendmsg::<()>(self.socket.as_raw_fd(), &parts, rights, MsgFlags::empty(), None).unwrap();
    }

    pub(crate) fn reply(&mut self) -> Reply {
        loop {
            match self.receive() {
                FromVmm::Reply(reply) => return reply,
                FromVmm::Event(event) => self.events.push_back(event),
            }
        }
    }

    fn receive(&self) -> FromVmm {
        let mut packet = vec![0; MAX_PACKET];
        let mut parts = [IoSliceMut::new(&mut packet)];
        let length = recvmsg::<()>(self.socket.as_raw_fd(), &mut parts, None, MsgFlags::empty()).unwrap().bytes;
        assert!(length > 0, "the VMM is gone");
        serde_json::from_slice(&packet[..length]).unwrap()
    }

    pub(crate) fn event(&mut self) -> Event {
        if let Some(event) = self.events.pop_front() {
            return event;
        }
        match self.receive() {
            FromVmm::Event(event) => event,
            FromVmm::Reply(reply) => panic!("{reply:?}"),
        }
    }

    pub(crate) fn done(&mut self, request: &Request) {
        assert_eq!(self.ask(request, vec![]), Reply::Done, "{request:?}");
    }

    pub(crate) fn refused(&mut self, request: &Request) -> String {
        match self.ask(request, vec![]) {
            Reply::Failed { reason } => reason,
            other => panic!("{request:?}: {other:?}"),
        }
    }

    pub(crate) fn boot(&mut self, kvm: File, kernel: &[u8], vcpus: u8) -> Result<(), String> {
        self.boot_with(kvm, kernel, machine(vcpus), vec![])
    }

    pub(crate) fn boot_with(
        &mut self,
        kvm: File,
        kernel: &[u8],
        machine: MachineSpec,
        disks: Vec<File>,
    ) -> Result<(), String> {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(kernel, 0).unwrap();
        let mut files = vec![file];
        files.extend(disks);
        if let Reply::Failed { reason } = self.ask(&Request::Prepare(machine), vec![kvm]) {
            return Err(reason);
        }
        match self.ask(&Request::Boot { cmdline: "test".into() }, files) {
            Reply::Built(_) => Ok(()),
            Reply::Failed { reason } => Err(reason),
            other => panic!("{other:?}"),
        }
    }

    /// Prepares a shell and restores into it. The first file is `/dev/kvm`.
    pub(crate) fn restore(&mut self, machine: MachineSpec, mut files: Vec<File>) -> Reply {
        let rest = files.split_off(1);
        match self.ask(&Request::Prepare(machine), files) {
            Reply::Done => self.ask(&Request::Restore, rest),
            other => other,
        }
    }

    pub(crate) fn console(&mut self) -> String {
        match self.ask(&Request::Console, vec![]) {
            Reply::Console { tail } => tail,
            other => panic!("{other:?}"),
        }
    }

    /// The console once it satisfies `enough`.
    pub(crate) fn console_until(&mut self, enough: impl Fn(&str) -> bool) -> String {
        let start = Instant::now();
        loop {
            let tail = self.console();
            if enough(&tail) {
                return tail;
            }
            assert!(start.elapsed() < PATIENCE, "{tail}");
            thread::yield_now();
        }
    }

    /// Closes the socket; the VMM must end by itself and in peace.
    pub(crate) fn end(self) {
        drop(self.socket);
        (self.ended)();
    }
}
