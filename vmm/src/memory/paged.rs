//! Memory that a pager fills: the VMM's half of it.
//!
//! ```text
//!  prepare: userfaultfd, a thread that waits ──restore: mapping registered, handed over──▶ filled as it is touched
//!                                                                 └─ the pager's socket closes: the process ends at once
//! ```
//!
//! The userfaultfd stays open here as long as the memory is used. Were the pager's the only one, its end would let every page that was not
//! filled yet read as zero; so they wait, and the process ends. A thread of its own sees to that, since any other may be among those that wait.

use std::{
    fs::File,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
};

use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, Shutdown, recv, shutdown},
};
use stasis_vmm_api::pager::Handover;

use super::Room;
use crate::{
    control,
    error::{Error, Host},
    jail::{self, Role},
    uffd::Faults,
};

/// What is prepared before it is known which pager it will be.
pub(crate) struct Prepared {
    faults: Faults,
    watched: mpsc::Sender<Arc<Link>>,
}

/// Memory that is filled by a pager, until this is dropped; nobody may touch it any more then.
pub(crate) struct Paged {
    link: Arc<Link>,
    _faults: Faults,
}

struct Link {
    socket: UnixStream,
    /// The VM has ended first.
    over: AtomicBool,
}

impl Prepared {
    /// From an open `/dev/userfaultfd`.
    pub(crate) fn new(device: &File) -> Result<Self, Error> {
        let faults = Faults::from_device(device)?;
        let (watched, receiver) = mpsc::channel::<Arc<Link>>();
        let watch = move || {
            jail::confine_or_abort(Role::PagerWatch);
            // None comes of a shell that is given up.
            if let Ok(link) = receiver.recv() {
                watch(&link);
            }
        };
        thread::Builder::new().name("pager-watch".into()).spawn(watch).host("the thread that watches the pager")?;
        Ok(Self { faults, watched })
    }

    /// Has the pager at the other end of `socket` fill what is mapped in `room`.
    pub(crate) fn fill(self, room: &Room, socket: OwnedFd) -> Result<Paged, Error> {
        self.faults.register(&room.addresses())?;
        let handover = Handover { address: room.addresses().start, bytes: room.size() as u64 };
        control::send(socket.as_fd(), &handover, Some(self.faults.as_fd()))?;
        // Whoever made it may have polled it; the thread that watches waits in a read.
        let socket = UnixStream::from(socket);
        socket.set_nonblocking(false).host("the pager's socket")?;
        let link = Arc::new(Link { socket, over: AtomicBool::new(false) });
        self.watched.send(Arc::clone(&link)).map_err(|_| Error::Refused("nobody watches the pager"))?;
        Ok(Paged { link, _faults: self.faults })
    }
}

/// Waits for the pager's end, which is the process's too.
fn watch(link: &Link) {
    let mut byte = [0];
    // A pager says nothing: whatever is received here is no pager's.
    while recv(link.socket.as_raw_fd(), &mut byte, MsgFlags::empty()) == Err(Errno::EINTR) {}
    if !link.over.load(Ordering::Acquire) {
        tracing::error!("the pager no longer fills this VM's memory: the VM ends");
        // SAFETY: it ends the process, whatever its other threads do or wait for; nothing is to be cleaned up that the kernel does not.
        unsafe { libc::_exit(1) }
    }
}

impl Drop for Paged {
    fn drop(&mut self) {
        self.link.over.store(true, Ordering::Release);
        let _ = shutdown(self.link.socket.as_raw_fd(), Shutdown::Both); // it fails where the pager has ended too
    }
}
