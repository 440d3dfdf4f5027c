//! The system calls of each thread, each with its reason. What is not here kills the process.
//!
//! No list has a call that takes a path, makes a socket by itself, starts a process, or makes memory executable.

use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::{
    SeccompCmpArgLen::{Dword, Qword},
    SeccompCmpOp::{Eq, MaskedEq},
    SeccompCondition, SeccompRule,
};

use super::ioctls;
use crate::error::Error;

/// `CLONE_*` as glibc's `pthread_create` gives them: a thread, never a process, never a namespace.
const THREAD: u64 = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID) as u64;

/// A list of system calls.
pub(super) struct Calls(BTreeMap<i64, Vec<SeccompRule>>);

/// Its arguments lie in memory, where no filter can see them: the C library hears that the kernel does not know it, and takes `clone`.
pub(super) fn unknown() -> Result<Calls, Error> {
    Ok(Calls::none().any(&[libc::SYS_clone3]))
}

/// Preparing a shell and starting its threads, and whatever the threads will do: a thread can only narrow what it inherits.
pub(super) fn building() -> Result<Calls, Error> {
    let calls = Calls::none()
        .ioctls(&ioctls::VCPU)? // of a vCPU that is restored before its thread starts, and of the threads
        .ioctls(&ioctls::BUILD)?
        .ioctls(&ioctls::UFFD_MAKE)?
        .any(&[
            libc::SYS_clone3,          // see `unknown`
            libc::SYS_set_robust_list, // a thread's first steps, these four
            libc::SYS_rseq,
            libc::SYS_sched_getaffinity,
            libc::SYS_set_tid_address,
        ])
        .when(libc::SYS_clone, 0, THREAD)?
        .when(libc::SYS_prctl, 0, libc::PR_SET_NAME.unsigned_abs().into())? // a thread's name
        .when(libc::SYS_prctl, 0, libc::PR_SET_NO_NEW_PRIVS.unsigned_abs().into())? // the next filter, these two
        .when(libc::SYS_seccomp, 0, libc::SECCOMP_SET_MODE_FILTER.into())?;
    of_the_loop(calls)
}

/// The event loop, once there is a shell: requests, devices, snapshots, rewinds.
pub(super) fn event_loop() -> Result<Calls, Error> {
    of_the_loop(Calls::none())
}

/// A vCPU: entering the guest, registers of devices, saving and restoring its state.
pub(super) fn vcpu() -> Result<Calls, Error> {
    of_any_thread(Calls::none().ioctls(&ioctls::VCPU)?)
}

/// A pager: requests, images, and the faults of its VMs. It makes no memory but its allocator's.
pub(super) fn pager() -> Result<Calls, Error> {
    let calls = Calls::none()
        .any(&[
            libc::SYS_epoll_wait,
            libc::SYS_epoll_pwait,
            // The control socket, and its VMs'.
            libc::SYS_recvmsg,
            libc::SYS_sendmsg,
            // Images, the memory that they are put into, and the working set.
            libc::SYS_pread64,
            libc::SYS_pwrite64,
            libc::SYS_fstat,
            libc::SYS_ftruncate,
        ])
        .when(libc::SYS_statx, 2, (libc::AT_EMPTY_PATH | libc::AT_STATX_SYNC_AS_STAT).unsigned_abs().into())?
        .when(libc::SYS_newfstatat, 3, libc::AT_EMPTY_PATH.unsigned_abs().into())?
        .when(libc::SYS_fcntl, 1, libc::F_GETFL.unsigned_abs().into())?
        .ioctls(&[ioctls::UFFDIO_CONTINUE, ioctls::UFFDIO_WAKE])?;
    of_any_thread(calls)
}

/// The thread that waits for the end of a VM's pager.
pub(super) fn pager_watch() -> Result<Calls, Error> {
    of_any_thread(Calls::none().any(&[libc::SYS_recvfrom]))
}

fn of_the_loop(calls: Calls) -> Result<Calls, Error> {
    let calls = calls
        .any(&[
            libc::SYS_epoll_wait,
            libc::SYS_epoll_pwait,
            // The control socket.
            libc::SYS_recvmsg,
            libc::SYS_sendmsg,
            // vsock's streams, and a TAP device.
            libc::SYS_recvfrom,
            libc::SYS_sendto,
            libc::SYS_readv,
            libc::SYS_writev,
            // Disks and memory images.
            libc::SYS_pread64,
            libc::SYS_pwrite64,
            libc::SYS_preadv,
            libc::SYS_pwritev,
            libc::SYS_lseek,
            libc::SYS_fstat,
            libc::SYS_ftruncate,
            libc::SYS_fallocate,
            libc::SYS_fdatasync,
            libc::SYS_fsync,
            libc::SYS_memfd_create, // the memory of a guest that boots
            // Devices' timers and notifications.
            libc::SYS_eventfd2,
            libc::SYS_timerfd_create,
            libc::SYS_timerfd_gettime,
        ])
        // A connection that the guest makes: two ends that know nobody else.
        .when(libc::SYS_socketpair, 0, libc::AF_UNIX.unsigned_abs().into())?
        // The next owner of a VM that is kept, at the one listening socket that the node passed: none can be made here.
        .when(libc::SYS_accept4, 3, libc::SOCK_CLOEXEC.unsigned_abs().into())?
        // The metadata of an open file. A path could be given beside the flag, but leads nowhere: the root is empty.
        .when(libc::SYS_statx, 2, (libc::AT_EMPTY_PATH | libc::AT_STATX_SYNC_AS_STAT).unsigned_abs().into())?
        .when(libc::SYS_newfstatat, 3, libc::AT_EMPTY_PATH.unsigned_abs().into())?
        // Another descriptor of the same file; never a change of the file's flags.
        .when(libc::SYS_fcntl, 1, libc::F_DUPFD_CLOEXEC.unsigned_abs().into())?
        .when(libc::SYS_fcntl, 1, libc::F_GETFL.unsigned_abs().into())?
        .ioctls(&ioctls::MACHINE_STATE)?
        .ioctls(&ioctls::TAP)?
        .ioctls(&ioctls::UFFD)?
        .ioctls(&[ioctls::FIONBIO, ioctls::FICLONE, ioctls::PAGEMAP_SCAN])?;
    of_any_thread(calls)
}

/// What the standard library, the allocator and our own shared code do in every thread.
fn of_any_thread(calls: Calls) -> Result<Calls, Error> {
    let this_process = std::process::id().into();
    calls
        .any(&[
            // Locks, channels, and the end of waiting.
            libc::SYS_futex,
            libc::SYS_sched_yield,
            libc::SYS_restart_syscall,
            libc::SYS_clock_gettime, // where the vDSO cannot answer
            // The allocator; `madvise` also gives a guest's pages back.
            libc::SYS_brk,
            libc::SYS_munmap,
            libc::SYS_mremap,
            libc::SYS_madvise,
            // Event counters; a log line or a last message on standard error; closing.
            libc::SYS_read,
            libc::SYS_write,
            libc::SYS_close,
            // A guest that resets its vsock device ends its streams, from the vCPU's thread.
            libc::SYS_epoll_ctl,
            libc::SYS_shutdown,
            libc::SYS_timerfd_settime, // and one that resets a rate-limited device its timer
            libc::SYS_getrandom,       // keys of hash maps
            // A kick's handler returns; `abort` blocks signals and takes the default action.
            libc::SYS_rt_sigreturn,
            libc::SYS_rt_sigprocmask,
            libc::SYS_rt_sigaction,
            libc::SYS_sigaltstack, // a thread's end
            libc::SYS_getpid,
            libc::SYS_gettid,
            libc::SYS_exit,
            libc::SYS_exit_group,
        ])
        .when(libc::SYS_fcntl, 1, libc::F_GETFD.unsigned_abs().into())? // a debug build looks before it closes
        .when(libc::SYS_tgkill, 0, this_process)? // kicks, and `abort`
        // A driver's features, and their end with a reset.
        .ioctls(&[ioctls::TUNSETOFFLOAD])?
        .without(libc::SYS_mmap, 2, libc::PROT_EXEC)?
        .without(libc::SYS_mprotect, 2, libc::PROT_EXEC)
}

impl Calls {
    fn none() -> Self {
        Self(BTreeMap::new())
    }

    /// The calls, with any arguments.
    fn any(mut self, calls: &[c_long]) -> Self {
        self.0.extend(calls.iter().map(|call| (*call, Vec::new())));
        self
    }

    /// The call, where an argument has this value. Numbers of 32 bits are compared as the kernel takes them: without what is above.
    fn when(self, call: c_long, argument: u8, value: u64) -> Result<Self, Error> {
        self.rule(call, SeccompCondition::new(argument, Dword, Eq, value))
    }

    /// The call, where none of these bits is in the argument.
    fn without(self, call: c_long, argument: u8, bits: i32) -> Result<Self, Error> {
        self.rule(call, SeccompCondition::new(argument, Qword, MaskedEq(bits.unsigned_abs().into()), 0))
    }

    fn ioctls(self, numbers: &[u64]) -> Result<Self, Error> {
        numbers.iter().try_fold(self, |calls, number| calls.when(libc::SYS_ioctl, 1, *number))
    }

    fn rule(
        mut self,
        call: c_long,
        condition: Result<SeccompCondition, seccompiler::BackendError>,
    ) -> Result<Self, Error> {
        let rule = condition.and_then(|condition| SeccompRule::new(vec![condition]));
        let rule = rule.map_err(|error| Error::Filter(error.into()))?;
        self.0.entry(call).or_default().push(rule);
        Ok(self)
    }

    pub(super) fn rules(self) -> BTreeMap<i64, Vec<SeccompRule>> {
        self.0
    }
}
