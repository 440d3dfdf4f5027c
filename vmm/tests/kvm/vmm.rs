//! The node's end of the control socket, with `serve` in a thread or a jailed process behind it.

use std::{
    fs::File,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileExt,
    },
    thread,
    time::{Duration, Instant},
};

use nix::sys::{
    socket::{AddressFamily, SockFlag, SockType, setsockopt, socketpair, sockopt::ReceiveTimeout},
    time::{TimeVal, TimeValLike},
};
use stasis_vmm_api::{Client, Event, MachineSpec, Reply, Request};

const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for its peaceful end.
pub(crate) type Ended = Box<dyn FnOnce()>;

pub(crate) struct Vmm {
    client: Client,
    ended: Ended,
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
    pub(crate) fn over(start: impl FnOnce(OwnedFd) -> Ended) -> Self {
        let (socket, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        setsockopt(&socket, ReceiveTimeout, &TimeVal::seconds(60)).unwrap();
        Self { client: Client::new(socket), ended: start(theirs) }
    }

    /// The client of whoever is at the other end of the socket.
    #[allow(dead_code, reason = "tests/jail uses it")]
    pub(crate) fn at(socket: OwnedFd, ended: Ended) -> Self {
        Self { client: Client::new(socket), ended }
    }

    /// Closes the socket, and waits for nothing.
    #[allow(dead_code, reason = "tests/jail uses it")]
    pub(crate) fn leave(self) -> Ended {
        self.ended
    }

    /// One request and its answer.
    pub(crate) fn ask(&mut self, request: &Request, files: Vec<File>) -> Reply {
        self.send(request, files);
        self.reply()
    }

    /// A request whose answer [`Vmm::reply`] waits for.
    pub(crate) fn send(&self, request: &Request, files: Vec<File>) {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        self.client.send(request, &files).unwrap();
    }

    pub(crate) fn reply(&mut self) -> Reply {
        self.client.reply().unwrap()
    }

    pub(crate) fn event(&mut self) -> Event {
        self.client.event().unwrap()
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
        match self.ask(&Request::Boot { cmdline: "test".into(), initrd: false }, files) {
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
        drop(self.client);
        (self.ended)();
    }
}
