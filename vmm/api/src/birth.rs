//! What a VMM process is given at its birth, since it cannot make it for itself, or not as cheaply.
//!
//! A pid namespace holds only processes that are born in it, so whoever starts a VMM process makes it the first of a new one
//! ([`PidNamespaces`]): killing it ends all that is in there, and it sees no process but its own. The empty namespaces
//! ([`Nothing`]) are made once: unmounting the host's files waits for all CPUs (2 to 20 ms), a copy of nothing does not.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    thread,
};

use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
    sys::socket::{AddressFamily, SockFlag, SockType, socketpair},
    unistd::{chdir, pivot_root},
};

use crate::Packets;

/// A mount namespace without files, and a network namespace without interfaces (but `lo`, which is down).
#[derive(Debug)]
pub struct Nothing {
    /// A VMM process enters it, and goes on in a copy of its own.
    pub mounts: OwnedFd,
    /// All VMM processes share it: there is nothing in it, and none may make a socket.
    pub net: OwnedFd,
}

impl Nothing {
    /// Makes both, as root. They live as long as their descriptors and the processes inside.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn make() -> io::Result<Self> {
        // Namespaces belong to threads, and this one must not keep these.
        thread::Builder::new()
            .name("nothing".into())
            .spawn(Self::make_here)?
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread that makes namespaces panicked")))
    }

    /// What a VMM process is to be given as its standard output: a socket in which both wait for it, the mounts first.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn hand_over(&self) -> io::Result<OwnedFd> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        Packets::new(ours).send(&(), &[self.mounts.as_fd(), self.net.as_fd()])?;
        Ok(theirs)
    }

    fn make_here() -> io::Result<Self> {
        /// Any folder that is there on every host; only this thread sees what is mounted on it.
        const PLACE: &str = "/proc";
        const SEALED: MsFlags =
            MsFlags::MS_RDONLY.union(MsFlags::MS_NOSUID).union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC);
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET)?;
        let mounts = File::open("/proc/thread-self/ns/mnt")?.into();
        let net = File::open("/proc/thread-self/ns/net")?.into();
        // Else the host would lose its root too.
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)?;
        mount(Some("nothing"), PLACE, Some("tmpfs"), SEALED, Some("size=4k,nr_inodes=1,mode=555"))?;
        chdir(PLACE)?;
        // The old root comes to lie on the new one, which so needs no folder for it.
        pivot_root(".", ".")?;
        umount2(".", MntFlags::MNT_DETACH)?;
        Ok(Self { mounts, net })
    }
}

/// Makes pid namespaces. For a thread of its own: until the next call, whatever this thread starts is born in the last one.
#[derive(Debug)]
pub struct PidNamespaces {
    own: File,
}

impl PidNamespaces {
    /// For the calling thread.
    ///
    /// # Errors
    /// Where there is no `/proc`.
    pub fn new() -> io::Result<Self> {
        Ok(Self { own: File::open("/proc/thread-self/ns/pid")? })
    }

    /// Runs `start`, whose first process is the first of a new pid namespace.
    ///
    /// # Errors
    /// What the kernel said, or `start`.
    pub fn with_new<T>(&self, start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        // A new one can only be made below the thread's own.
        setns(&self.own, CloneFlags::CLONE_NEWPID)?;
        unshare(CloneFlags::CLONE_NEWPID)?;
        start()
    }
}
