//! The jail: what a VMM process gives up before it serves its first request.
//!
//! ```text
//!  born      root, PID 1 of a pid namespace of its own; standard input: control socket; standard output: a socket with an empty mount and
//!   │         an empty network namespace
//!   │ enter    descriptors closed, limits set, namespaces entered, no root left that has files in it,
//!   │          capabilities dropped, one uid per VM, no new privileges
//!   ▼
//!  jailed ──serve──▶ shell prepared ──▶ Loop            system calls: `calls` lists them, `program` translates, `filter` installs
//!                        ├──thread started──▶ Vcpu
//!                        └──of a paged VM────▶ PagerWatch      (a pager is jailed alike, and goes on as Pager)
//! ```
//!
//! It fails closed: any error ends the process, with the reason on standard error, which is the node's log. After
//! it the process can reach what it holds descriptors of, and nothing else.

mod calls;
mod filter;
mod ioctls;
mod program;

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
};

use nix::{
    sched::{CloneFlags, setns, unshare},
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        stat::{Mode, umask},
    },
    unistd::{Gid, Uid, chdir, dup2_stdout, getpid, setgroups, sethostname, setresgid, setresuid},
};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

pub(crate) use filter::confine_or_abort;
pub use filter::{Role, confine};

use crate::{
    control,
    error::{Error, Host},
    memory::Pagemap,
};

/// Lowest uid that a VM may run as: below are the host's own users.
const LOWEST_UID: u32 = 1000;
/// Descriptors: one per vsock stream, and some dozens for the machine.
const MOST_FILES: u64 = 4096;
/// Threads: 32 vCPUs, the event loop, and those that KVM starts in the process's name.
const MOST_THREADS: u64 = 64;

/// Enters the jail as `uid`, first of all and with one thread. What is returned is the one thing that has to be opened by a path, and so before.
///
/// # Errors
/// Whatever keeps it from being whole. The process must end then.
pub fn enter(uid: u32) -> Result<Pagemap, Error> {
    if uid < LOWEST_UID {
        return Err(Error::Jail("a VM's uid must be 1000 or more: see --jail-uid-base of `stasis up`"));
    }
    if getpid().as_raw() != 1 {
        return Err(Error::Jail(
            "this process was not born in a pid namespace: `stasis vmm` is started by the node, not by hand",
        ));
    }
    close_the_rest()?;
    let [mounts, net] = handed_over()?;
    let pagemap = without_capabilities(Pagemap::of_this_process)?;
    limit()?;
    leave_the_host(mounts, net)?;
    drop_privileges(uid)?;
    Ok(pagemap)
}

/// Keeps the C library's allocator from opening files. It counts CPUs, in `/sys`, before it makes its ninth arena, and a thread that allocates for
/// the first time makes one: a limit that is given needs no count. And before it gives memory at an arena's end back, it reads whether the host
/// overcommits, in `/proc`: so it keeps it. What is large is mapped by itself, and unmapped when it is freed.
pub(crate) fn tame_allocator() -> Result<(), Error> {
    /// The one that is there: vCPUs allocate next to nothing, so the event loop does not wait for them, and another one costs more to make than it
    /// would save.
    const ARENAS: i32 = 1;
    /// Turns giving back off (mallopt(3)).
    const NEVER: i32 = -1;
    for (option, value) in [(libc::M_ARENA_MAX, ARENAS), (libc::M_TRIM_THRESHOLD, NEVER)] {
        // SAFETY: these options take one number, and change nothing of what has been allocated.
        if unsafe { libc::mallopt(option, value) } != 1 {
            return Err(Error::Jail("the C library's allocator refuses a limit"));
        }
    }
    Ok(())
}

/// The namespaces that the node passed in what is standard output, which goes where standard error does from then on.
fn handed_over() -> Result<[OwnedFd; 2], Error> {
    const NONE: Error = Error::Jail("the node passed no empty namespaces");
    // As small as what comes: see `Control` for what a larger one would do.
    let received = control::receive::<()>(io::stdout().as_fd(), &mut [0; 16]).map_err(|_| NONE)?.ok_or(NONE)?;
    // Should they be something else than namespaces, then `setns` refuses them.
    let [mounts, net] = received.files.try_into().map_err(|_| NONE)?;
    dup2_stdout(io::stderr()).host("dup2 of standard error")?;
    Ok([mounts.into(), net.into()])
}

/// Whatever the node let slip beyond standard error.
fn close_the_rest() -> Result<(), Error> {
    const FIRST: u32 = libc::STDERR_FILENO.unsigned_abs() + 1;
    // SAFETY: nothing in this process has opened a descriptor above these yet, so none is owned.
    match unsafe { libc::close_range(FIRST, u32::MAX, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()).host("close_range"),
    }
}

/// The kernel remembers what the opener of its page tables was allowed: with a capability more, they would show physical addresses too.
fn without_capabilities<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let own = capabilities(None).host("capget")?;
    set_capabilities(None, CapabilitySets { effective: CapabilitySet::empty(), ..own }).host("capset")?;
    let done = work();
    set_capabilities(None, own).host("capset")?;
    done
}

fn limit() -> Result<(), Error> {
    let limits = [
        (Resource::RLIMIT_CORE, 0), // a dump would hold the guest's memory
        (Resource::RLIMIT_NOFILE, MOST_FILES),
        (Resource::RLIMIT_NPROC, MOST_THREADS),
        (Resource::RLIMIT_MEMLOCK, 0),
        (Resource::RLIMIT_MSGQUEUE, 0),
    ];
    for (resource, most) in limits {
        let (_, hard) = getrlimit(resource).host("getrlimit")?;
        let most = most.min(hard);
        setrlimit(resource, most, most).host("setrlimit")?;
    }
    Ok(())
}

/// Namespaces of its own, and an empty root.
fn leave_the_host(mounts: OwnedFd, net: OwnedFd) -> Result<(), Error> {
    setns(mounts.as_fd(), CloneFlags::CLONE_NEWNS).host("setns into the empty mount namespace")?;
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS).host("unshare")?;
    setns(net.as_fd(), CloneFlags::CLONE_NEWNET).host("setns into the empty network namespace")?;
    sethostname("vm").host("sethostname")?;
    chdir("/").host("chdir")?;
    // The node could have passed another mount namespace by mistake.
    match fs::read_dir("/").host("open of the empty root")?.next() {
        None => Ok(()),
        Some(_) => Err(Error::Jail("the root that the node passed is not empty")),
    }
}

fn drop_privileges(uid: u32) -> Result<(), Error> {
    drop_bounding_set()?;
    let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
    setgroups(&[]).host("setgroups")?;
    setresgid(group, group, group).host("setresgid")?;
    setresuid(user, user, user).host("setresuid")?;
    // Leaving root emptied all but the inheritable set; this empties that too, and with it the ambient one.
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none }).host("capset")?;
    nix::sys::prctl::set_no_new_privs().host("PR_SET_NO_NEW_PRIVS")?;
    // No other process may look into this one, even with the same uid.
    nix::sys::prctl::set_dumpable(false).host("PR_SET_DUMPABLE")?;
    umask(Mode::from_bits_truncate(0o077));
    Ok(())
}

/// All capabilities that this kernel knows, which may be more than we do.
fn drop_bounding_set() -> Result<(), Error> {
    for capability in 0.. {
        // SAFETY: this option takes one number, and touches no memory.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability as libc::c_ulong, 0, 0, 0) } < 0 {
            let error = io::Error::last_os_error();
            // The first number that the kernel does not know, behind its last capability.
            let end = capability > 0 && error.raw_os_error() == Some(libc::EINVAL);
            return if end { Ok(()) } else { Err(error).host("PR_CAPBSET_DROP") };
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_freed_at_an_arena_s_end_opens_no_file() {
        // A thread of its own has an arena of its own. What it may not do kills the process.
        let freed = std::thread::spawn(|| {
            let own = Box::new([1u8; 100]);
            tame_allocator().unwrap();
            confine_or_abort(Role::Vcpu);
            let pieces: Vec<_> = (0..64).map(|_| vec![1u8; 64 << 10]).collect();
            pieces.len() + own.len()
        });
        assert_eq!(freed.join().unwrap(), 164);
    }
}
