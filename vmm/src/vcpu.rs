//! One vCPU: a thread, and the commands that move it between its states.
//!
//! ```text
//!            Run                       guest stops
//!  paused ─────────▶ running ─────────────────────────▶ stopped
//!    ▲  │◀──────────────│  Pause (kick, finish the pending access)
//!    └──┘ Do (save, restore, …): only while paused
//! ```
//!
//! The thread owns the vCPU's descriptor; nothing else touches it. It knows no devices until it runs, so it can be there before they are. A kick is `immediate_exit` set from outside, then a signal:
//! whichever of the two the thread meets first, it looks at its queue before it enters the guest again.

mod crash;
mod fpu;
mod state;
mod tsc;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering, fence},
        mpsc::{self, Receiver, Sender, TryRecvError},
    },
    thread,
};

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use kvm_ioctls::{VcpuExit, VcpuFd};
use stasis_vmm_api::{GuestCrash, Stop};
use vmm_sys_util::{
    eventfd::EventFd,
    signal::{Killable, SIGRTMIN, register_signal_handler},
};

pub(crate) use fpu::area_bytes;
pub(crate) use state::{Extent, Gap, VcpuState, cpuid_entries, restore as put_state};
pub(crate) use tsc::{HostTsc, Offset};

use crate::{
    bus::{Access, Bus},
    error::{Error, Host, Ioctl},
    jail::{self, Role},
    snapshot::VmState,
};

enum Command {
    Run(Arc<Bus>),
    Pause(Sender<()>),
    Do(Work),
}

/// Something to do with a paused vCPU's descriptor, or to hear why it is not to be had.
type Work = Box<dyn FnOnce(Result<&VcpuFd, Error>) + Send>;

/// The handle of a vCPU's thread.
pub(crate) struct Vcpu {
    commands: Sender<Command>,
    kick: Kick,
    thread: thread::JoinHandle<()>,
    /// What its guest is told of its CPU.
    cpuid: Arc<[kvm_cpuid_entry2]>,
}

/// What a vCPU thread needs beside its descriptor.
pub(crate) struct Surroundings {
    /// Hears which vCPU has stopped for good, and why.
    pub(crate) stops: Sender<(usize, Stop)>,
    pub(crate) stopped: EventFd,
}

/// `immediate_exit` in the vCPU's shared page.
struct Kick(*const AtomicU8);

// SAFETY: the pointer is only used for atomic stores to a byte of the vCPU's mapping, which its thread keeps until the
// handle that holds this is dropped.
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
        let (commands, queue) = mpsc::channel();
        let mut state = Thread { id, fd, around, queue };
        let thread = thread::Builder::new()
            .name(format!("vcpu{id}"))
            .spawn(move || {
                jail::confine_or_abort(Role::Vcpu);
                state.live();
            })
            .host("spawn of a vCPU thread")?;
        Ok(Self { commands, kick, thread, cpuid: cpuid.as_slice().into() })
    }

    /// Lets the vCPU run, with `bus` to answer its accesses.
    pub(crate) fn run(&self, bus: &Arc<Bus>) -> Result<(), Error> {
        self.send(Command::Run(Arc::clone(bus)))
    }

    /// Stops it. The receiver hears when it has stopped.
    pub(crate) fn pause(&self) -> Result<Receiver<()>, Error> {
        let (done, paused) = mpsc::channel();
        self.send(Command::Pause(done))?;
        // SAFETY: the byte lies in the vCPU's mapping, which its thread keeps as long as its queue's sender, our field.
        let flag = unsafe { &*self.kick.0 };
        flag.store(1, Ordering::SeqCst);
        self.thread.kill(SIGRTMIN()).host("tgkill of a vCPU thread")?;
        Ok(paused)
    }

    /// Has the thread of a paused vCPU do something with its descriptor. The receiver hears what came of it.
    pub(crate) fn start<T: Send + 'static>(
        &self,
        work: impl FnOnce(&VcpuFd) -> Result<T, Error> + Send + 'static,
    ) -> Result<Doing<T>, Error> {
        let (done, outcome) = mpsc::channel();
        self.send(Command::Do(Box::new(move |fd| drop(done.send(fd.and_then(work))))))?;
        Ok(Doing(outcome))
    }

    /// Has the state of this paused vCPU read, which is number `index` of `restored`, if it was restored.
    pub(crate) fn save(
        &self,
        extent: &Arc<Extent>,
        restored: Option<&Arc<VmState>>,
        index: usize,
    ) -> Result<VcpuState, Error> {
        let (cpuid, extent, restored) = (Arc::clone(&self.cpuid), Arc::clone(extent), restored.cloned());
        self.with(move |fd| {
            let earlier = restored.as_ref().and_then(|state| state.vcpus.get(index));
            state::save(fd, &cpuid, &extent, earlier)
        })
    }

    /// Has the state of vCPU `index` of a snapshot put into this one, paused. CPUID is set only where the snapshot's differs, which KVM allows
    /// before the first run only.
    pub(crate) fn restore(&mut self, from: &Arc<VmState>, index: usize, now: HostTsc) -> Result<Doing<()>, Error> {
        let Some(state) = from.vcpus.get(index) else { return Err(Error::Snapshot("a vCPU is missing".into())) };
        let cpuid = if state.cpuid() == &*self.cpuid { None } else { Some(cpuid_entries(state.cpuid())?) };
        if cpuid.is_some() {
            self.cpuid = state.cpuid().into();
        }
        let from = Arc::clone(from);
        self.start(move |fd| {
            if let Some(cpuid) = &cpuid {
                fd.set_cpuid2(cpuid).ioctl("KVM_SET_CPUID2")?;
            }
            state::restore(fd, &from.vcpus[index], from.host.xsave_bytes(), Gap { then: from.taken_at, now })
        })
    }

    /// Has what of that state counts time put in once more.
    pub(crate) fn restore_time(&self, from: &Arc<VmState>, index: usize, now: HostTsc) -> Result<Doing<()>, Error> {
        let (from, gap) = (Arc::clone(from), Gap { then: from.taken_at, now });
        self.start(move |fd| from.vcpus.get(index).map_or(Ok(()), |state| state::restore_time(fd, state, gap)))
    }

    /// As `start`, and waits for it.
    pub(crate) fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&VcpuFd) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.start(work)?.wait()
    }

    fn send(&self, command: Command) -> Result<(), Error> {
        self.commands.send(command).map_err(|_| Error::Refused("the vCPU has stopped for good"))
    }
}

/// What a vCPU's thread has been given to do.
pub(crate) struct Doing<T>(Receiver<Result<T, Error>>);

impl<T> Doing<T> {
    pub(crate) fn wait(self) -> Result<T, Error> {
        self.0.recv().map_err(|_| Error::Refused("the vCPU has stopped for good"))?
    }
}

struct Thread {
    id: u8,
    fd: VcpuFd,
    around: Surroundings,
    queue: Receiver<Command>,
}

enum Next {
    Run,
    Pause,
    Stop(Stop),
}

impl Thread {
    /// Paused, running, paused, … until the handle is gone. A vCPU that has stopped for good stays, so that its mapping, and the flag in
    /// it, lives as long as the handle that writes to it.
    fn live(&mut self) {
        let mut stopped = false;
        while let Ok(command) = self.queue.recv() {
            match command {
                Command::Run(bus) if !stopped => {
                    if let Some(stop) = self.run(&bus) {
                        stopped = true;
                        // The receiver lives as long as the process; if it is gone, so is everyone who would care.
                        let _ = self.around.stops.send((usize::from(self.id), stop));
                        let _ = self.around.stopped.write(1);
                    }
                }
                Command::Run(_) => {}
                Command::Pause(done) => drop(done),
                Command::Do(work) if stopped => work(Err(Error::Refused("the vCPU has stopped for good"))),
                Command::Do(work) => work(Ok(&self.fd)),
            }
        }
    }

    /// Runs until a pause (None) or the guest's end.
    fn run(&mut self, bus: &Bus) -> Option<Stop> {
        loop {
            self.fd.set_kvm_immediate_exit(0);
            // Clear the flag, then look at the queue; `pause` fills the queue, then sets the flag. Were the two steps here
            // reordered (they are a store and a load), a pause between them would find neither.
            fence(Ordering::SeqCst);
            match self.queue.try_recv() {
                Ok(Command::Run(_)) | Err(TryRecvError::Empty) => {}
                Ok(Command::Pause(done)) => {
                    let stop = self.finish_pending_access(bus);
                    drop(done);
                    return stop;
                }
                Ok(Command::Do(work)) => work(Err(Error::Refused("the vCPU is running: pause it first"))),
                Err(TryRecvError::Disconnected) => return None,
            }
            match self.enter(bus) {
                Next::Run | Next::Pause => {}
                Next::Stop(stop) => return Some(stop),
            }
        }
    }

    /// The last exit may have been an access that KVM completes on the next entry; with `immediate_exit` it does only that. An access that
    /// crosses a page is handed over in pieces, with an exit for each.
    fn finish_pending_access(&mut self, bus: &Bus) -> Option<Stop> {
        self.fd.set_kvm_immediate_exit(1);
        loop {
            match self.enter(bus) {
                Next::Run => {}
                Next::Pause => return None,
                Next::Stop(stop) => return Some(stop),
            }
        }
    }

    fn enter(&mut self, bus: &Bus) -> Next {
        let crash = match self.fd.run() {
            Ok(VcpuExit::IoIn(port, data)) => {
                bus.port_in(port, data);
                return Next::Run;
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                return match bus.port_out(port, data) {
                    Access::Done => Next::Run,
                    Access::Reset => Next::Stop(Stop::Shutdown),
                };
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                bus.mmio_read(address, data);
                return Next::Run;
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                bus.mmio_write(address, data);
                return Next::Run;
            }
            Ok(VcpuExit::Intr) => return Next::Pause,
            Ok(VcpuExit::SystemEvent(..)) => return Next::Stop(Stop::Shutdown),
            Ok(exit) => crash::name_of(&exit),
            Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => return Next::Pause,
            Err(error) => format!("KVM_RUN: {error}"),
        };
        Next::Stop(Stop::Crash(self.describe(bus, crash)))
    }

    fn describe(&mut self, bus: &Bus, exit: String) -> GuestCrash {
        crash::describe(&mut self.fd, &bus.memory, self.id, exit)
    }
}
