//! The system calls of each thread, each with its reason. What is not here kills the process.
//!
//! No list has a call that takes a path, makes a socket by itself, starts a process, or makes memory executable.

use std::collections::btree_map::Entry;

use libc::c_long;

use super::{
    ioctls,
    program::{Allowed, List},
};
use crate::error::Error;

const TOO_LARGE: Error = Error::Jail("a number in a list of system calls has more than 32 bits");
const TWO_CONDITIONS: Error = Error::Jail("a system call is listed twice, under conditions that exclude each other");

/// A list of system calls that grows.
pub(super) struct Calls(List);

/// A vCPU: entering the guest, and registers of devices.
pub(super) fn vcpu() -> Result<Calls, Error> {
    of_any_thread(Calls::none().ioctls(&ioctls::VCPU_RUN)?)
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
        ])?
        .when(libc::SYS_statx, 2, (libc::AT_EMPTY_PATH | libc::AT_STATX_SYNC_AS_STAT).unsigned_abs().into())?
        .when(libc::SYS_newfstatat, 3, libc::AT_EMPTY_PATH.unsigned_abs().into())?
        .when(libc::SYS_fcntl, 1, libc::F_GETFL.unsigned_abs().into())?
        .ioctls(&[ioctls::UFFDIO_CONTINUE, ioctls::UFFDIO_WAKE])?;
    of_any_thread(calls)
}

/// The thread that waits for the end of a VM's pager.
pub(super) fn pager_watch() -> Result<Calls, Error> {
    of_any_thread(Calls::none().any(&[libc::SYS_recvfrom])?)
}

/// The event loop of a shell: requests, devices, snapshots, rewinds.
pub(super) fn event_loop() -> Result<Calls, Error> {
    let calls = Calls::none()
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
            libc::SYS_sync_file_range, // a snapshot on its way to the disk
            libc::SYS_memfd_create,    // the memory of a guest that boots
            // Devices' timers and notifications.
            libc::SYS_eventfd2,
            libc::SYS_timerfd_create,
            libc::SYS_timerfd_gettime,
        ])?
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
        .ioctls(&ioctls::VCPU_STATE)?
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
        ])?
        .when(libc::SYS_fcntl, 1, libc::F_GETFD.unsigned_abs().into())? // a debug build looks before it closes
        .when(libc::SYS_tgkill, 0, this_process)? // kicks, and `abort`
        // A driver's features, and their end with a reset.
        .ioctls(&[ioctls::TUNSETOFFLOAD])?
        .without(libc::SYS_mmap, 2, libc::PROT_EXEC)?
        .without(libc::SYS_mprotect, 2, libc::PROT_EXEC)
}

impl Calls {
    fn none() -> Self {
        Self(List::new())
    }

    /// The calls, with any arguments.
    fn any(mut self, calls: &[c_long]) -> Result<Self, Error> {
        for call in calls {
            self.0.insert(number(*call)?, Allowed::Any);
        }
        Ok(self)
    }

    /// The call, where an argument has this value, or one that is listed already.
    fn when(mut self, call: c_long, argument: u8, value: u64) -> Result<Self, Error> {
        let value = number(value)?;
        match self.0.entry(number(call)?) {
            Entry::Vacant(entry) => {
                entry.insert(Allowed::OneOf { argument, values: vec![value] });
            }
            Entry::Occupied(mut entry) => match entry.get_mut() {
                Allowed::OneOf { argument: same, values } if *same == argument => values.push(value),
                _ => return Err(TWO_CONDITIONS),
            },
        }
        Ok(self)
    }

    /// The call, where none of these bits is in the argument.
    fn without(mut self, call: c_long, argument: u8, bits: i32) -> Result<Self, Error> {
        match self.0.insert(number(call)?, Allowed::Without { argument, bits: bits.unsigned_abs() }) {
            None => Ok(self),
            Some(_) => Err(TWO_CONDITIONS),
        }
    }

    fn ioctls(self, numbers: &[u64]) -> Result<Self, Error> {
        numbers.iter().try_fold(self, |calls, number| calls.when(libc::SYS_ioctl, 1, *number))
    }

    pub(super) fn into_list(self) -> List {
        self.0
    }
}

fn number<T: TryInto<u32>>(of_any_size: T) -> Result<u32, Error> {
    of_any_size.try_into().map_err(|_| TOO_LARGE)
}
