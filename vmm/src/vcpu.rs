//! One vCPU: a thread that runs it, and the commands that move it between its states.
//!
//! ```text
//!            Run                       guest stops
//!  paused ─────────▶ running ─────────────────────────▶ stopped
//!    ▲  │◀──────────────│  Pause (kick, finish the pending access)
//!    └──┘ with (save, restore, …): only while paused
//! ```
//!
//! Its descriptor is behind a lock, which the thread holds while it runs. Of a paused vCPU the event loop reads and writes the state itself: to wake
//! another thread for it takes longer than the work. The thread knows no devices until it runs, so it can be there before they are. A kick is
//! `immediate_exit` set from outside, then a signal: whichever of the two the thread meets first, it looks at its queue before it enters the guest
//! again.

mod crash;
mod fpu;
mod state;
mod thread;
mod tsc;

use std::{
    sync::{
        Arc, Mutex, PoisonError, TryLockError,
        atomic::{AtomicU8, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread::{Builder, JoinHandle},
    time::Duration,
};

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use kvm_ioctls::VcpuFd;
use stasis_vmm_api::Stop;
use vmm_sys_util::{
    eventfd::EventFd,
    signal::{Killable, SIGRTMIN, register_signal_handler},
};

pub(crate) use fpu::area_bytes;
pub(crate) use state::{Extent, Gap, VcpuState, cpuid_entries, restore as put_state};
pub(crate) use tsc::{HostTsc, Offset};

pub(crate) use thread::Lasts;

use self::thread::{Command, Pause, Thread};
use crate::{
    bus::Bus,
    error::{Error, Host, Ioctl},
    jail::{self, Role},
    snapshot::VmState,
};

const RUNS: Error = Error::Refused("the vCPU is running: pause it first");
const HAS_STOPPED: Error = Error::Refused("the vCPU has stopped for good");

/// A vCPU, as the event loop has it.
pub(crate) struct Vcpu {
    core: Arc<Mutex<Core>>,
    commands: Sender<Command>,
    kick: Kick,
    thread: JoinHandle<()>,
    /// What its guest is told of its CPU.
    cpuid: Box<[kvm_cpuid_entry2]>,
}

/// What KVM has of a vCPU.
struct Core {
    fd: VcpuFd,
    /// It will never run again, and its state is that of no moment.
    has_stopped: bool,
}

/// A vCPU that is told to stop.
pub(crate) struct Pausing(Receiver<()>);

impl Pausing {
    /// Waits until it has stopped. To leave a guest takes less than to wake this thread for the news would.
    pub(crate) fn wait(self) {
        const TO_LEAVE_A_GUEST: Duration = Duration::from_micros(100);
        // The thread answers by dropping its end.
        let _ = thread::receive_soon(&self.0, TO_LEAVE_A_GUEST);
    }
}

/// What a vCPU thread needs beside its descriptor.
pub(crate) struct Surroundings {
    /// Hears which vCPU has stopped for good, and why.
    pub(crate) stops: Sender<(usize, Stop)>,
    pub(crate) stopped: EventFd,
}

/// `immediate_exit` in the vCPU's shared page.
struct Kick(*const AtomicU8);

// SAFETY: the pointer is only used for atomic stores to a byte of the vCPU's mapping, which the handle that holds this keeps with its `core`.
unsafe impl Send for Kick {}

/// Makes a thread's KVM_RUN return on SIGRTMIN. Once per process.
pub(crate) fn install_kick_handler() -> Result<(), Error> {
    extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    register_signal_handler(SIGRTMIN(), nothing).host("sigaction")
}

impl Vcpu {
    /// Starts the thread, paused, of a vCPU whose guest is to be told `cpuid`.
    pub(crate) fn spawn(id: u8, mut fd: VcpuFd, cpuid: &CpuId, around: Surroundings) -> Result<Self, Error> {
        fd.set_cpuid2(cpuid).ioctl("KVM_SET_CPUID2")?;
        let flag = &raw mut fd.get_kvm_run().immediate_exit;
        let kick = Kick(flag.cast_const().cast::<AtomicU8>());
        let core = Arc::new(Mutex::new(Core { fd, has_stopped: false }));
        let (commands, queue) = mpsc::channel();
        let of_thread = Thread { id, core: Arc::clone(&core), around, queue };
        let thread = Builder::new()
            .name(format!("vcpu{id}"))
            .spawn(move || {
                jail::confine_or_abort(Role::Vcpu);
                of_thread.live();
            })
            .host("spawn of a vCPU thread")?;
        Ok(Self { core, commands, kick, thread, cpuid: cpuid.as_slice().into() })
    }

    /// Lets the vCPU run, with `bus` to answer its accesses.
    pub(crate) fn run(&self, bus: &Arc<Bus>) -> Result<(), Error> {
        self.send(Command::Run(Arc::clone(bus)))
    }

    /// Stops it.
    pub(crate) fn pause(&self, lasts: Lasts) -> Result<Pausing, Error> {
        let (done, paused) = mpsc::channel();
        self.send(Command::Pause(Pause { done, lasts }))?;
        // SAFETY: the byte lies in the vCPU's mapping, which our field `core` keeps.
        let flag = unsafe { &*self.kick.0 };
        flag.store(1, Ordering::SeqCst);
        self.thread.kill(SIGRTMIN()).host("tgkill of a vCPU thread")?;
        Ok(Pausing(paused))
    }

    /// Does something with the descriptor of this paused vCPU.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&VcpuFd) -> Result<T, Error>) -> Result<T, Error> {
        let core = match self.core.try_lock() {
            Ok(core) => core,
            Err(TryLockError::Poisoned(core)) => PoisonError::into_inner(core),
            Err(TryLockError::WouldBlock) => return Err(RUNS),
        };
        if core.has_stopped { Err(HAS_STOPPED) } else { work(&core.fd) }
    }

    /// Reads the state of this paused vCPU, which was restored to `earlier`, if it was.
    pub(crate) fn save(&self, extent: &Extent, earlier: Option<&VcpuState>) -> Result<VcpuState, Error> {
        self.with(|fd| state::save(fd, &self.cpuid, extent, earlier))
    }

    /// Puts the state of vCPU `index` of a snapshot into this one, paused. CPUID is set only where the snapshot's differs, which KVM allows
    /// before the first run only.
    pub(crate) fn restore(&mut self, from: &VmState, index: usize, now: HostTsc) -> Result<(), Error> {
        let Some(state) = from.vcpus.get(index) else { return Err(Error::Snapshot("a vCPU is missing".into())) };
        if state.cpuid() != &*self.cpuid {
            let cpuid = cpuid_entries(state.cpuid())?;
            self.with(|fd| fd.set_cpuid2(&cpuid).ioctl("KVM_SET_CPUID2"))?;
            self.cpuid = state.cpuid().into();
        }
        self.with(|fd| state::restore(fd, state, from.host.xsave_bytes(), Gap { then: from.taken_at, now }))
    }

    /// Puts what of that state counts time in once more.
    pub(crate) fn restore_time(&self, from: &VmState, index: usize, now: HostTsc) -> Result<(), Error> {
        let Some(state) = from.vcpus.get(index) else { return Ok(()) };
        self.with(|fd| state::restore_time(fd, state, Gap { then: from.taken_at, now }))
    }

    fn send(&self, command: Command) -> Result<(), Error> {
        self.commands.send(command).map_err(|_| HAS_STOPPED)
    }
}
