//! A process that is born as the node's VMM processes are.

use std::{
    fs,
    io::Read,
    os::{fd::OwnedFd, unix::process::ExitStatusExt},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        LazyLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use command_fds::{CommandFdExt, FdMapping};
use stasis_vmm_api::birth::{Nothing, PidNamespaces};

/// This program's first argument as such a process. What it is to do follows, and the uid that it is to become.
pub(crate) const WORD: &str = "inmate";

static NOTHING: LazyLock<Nothing> = LazyLock::new(|| Nothing::make().unwrap());
static NEXT_UID: AtomicU32 = AtomicU32::new(300_000);

pub(crate) struct Inmate {
    pub(crate) child: Child,
    pub(crate) uid: u32,
}

impl Inmate {
    /// Starts one that waits for its control socket to close when it has nothing else to do.
    pub(crate) fn start(order: &str, control: OwnedFd) -> Self {
        let uid = NEXT_UID.fetch_add(1, Ordering::Relaxed);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env_clear().args([WORD, order, &uid.to_string()]);
        command.stdin(Stdio::from(control)).stdout(Stdio::from(NOTHING.hand_over().unwrap())).stderr(Stdio::piped());
        let mapping = |parent_fd, child_fd| FdMapping { parent_fd, child_fd };
        let mappings = vec![
            // Let slip, for the jail to close.
            mapping(fs::File::open("/dev/zero").unwrap().into(), 20),
        ];
        command.fd_mappings(mappings).unwrap();
        // The first process of a pid namespace; the thread is of no use afterwards.
        let birth = move || PidNamespaces::new().unwrap().with_new(|| command.spawn()).unwrap();
        Self { child: thread::spawn(birth).join().unwrap(), uid }
    }

    pub(crate) fn end(mut self) -> (ExitStatus, String) {
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (self.child.wait().unwrap(), said)
    }

    /// A file of its folder in `/proc`.
    pub(crate) fn proc(&self, file: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{file}", self.child.id())).unwrap()
    }
}

/// Runs one order to its end.
pub(crate) fn run(order: &str) -> (ExitStatus, String) {
    let (_held, control) = std::os::unix::net::UnixStream::pair().unwrap();
    Inmate::start(order, control.into()).end()
}

pub(crate) fn died_of(status: ExitStatus) -> Option<i32> {
    status.signal()
}
