//! One vCPU: a thread, and the commands that move it between its states.
//!
//! ```text
//!            Run                       guest stops
//!  paused ─────────▶ running ─────────────────────────▶ stopped
//!    ▲  │◀──────────────│  Pause (kick, finish the pending access)
//!    └──┘ Save, Restore: only while paused
//! ```
//!
//! The thread owns the vCPU's descriptor; nothing else touches it. A kick is `immediate_exit` set from outside, then a signal:
//! whichever of the two the thread meets first, it looks at its queue before it enters the guest again.

mod crash;
mod state;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering, fence},
        mpsc::{self, Receiver, Sender, TryRecvError},
    },
    thread,
};

use kvm_ioctls::{VcpuExit, VcpuFd};
use stasis_vmm_api::{GuestCrash, Stop};
use vmm_sys_util::{
    eventfd::EventFd,
    signal::{Killable, SIGRTMIN, register_signal_handler},
};

pub(crate) use state::{VcpuState, restore, save};

use crate::{
    bus::{Access, Bus},
    error::{Error, Host},
    jail::{self, Role},
};

enum Command {
    Run,
    Pause(Sender<()>),
    Save(Sender<Result<VcpuState, Error>>),
}

/// The handle of a vCPU's thread.
pub(crate) struct Vcpu {
    commands: Sender<Command>,
    kick: Kick,
    thread: thread::JoinHandle<()>,
}

/// What a vCPU thread needs beside its descriptor.
pub(crate) struct Surroundings {
    pub(crate) bus: Arc<Bus>,
    /// The MSRs that KVM lists on this host.
    pub(crate) msr_indices: Arc<[u32]>,
    pub(crate) stops: Sender<Stop>,
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
    /// Starts the thread, paused.
    pub(crate) fn spawn(id: u8, mut fd: VcpuFd, around: Surroundings) -> Result<Self, Error> {
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
        Ok(Self { commands, kick, thread })
    }

    /// Lets the vCPU run.
    pub(crate) fn run(&self) -> Result<(), Error> {
        self.send(Command::Run)
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

    /// The state of a paused vCPU.
    pub(crate) fn save(&self) -> Result<VcpuState, Error> {
        let (done, saved) = mpsc::channel();
        self.send(Command::Save(done))?;
        saved.recv().map_err(|_| Error::Refused("the vCPU has stopped for good"))?
    }

    fn send(&self, command: Command) -> Result<(), Error> {
        self.commands.send(command).map_err(|_| Error::Refused("the vCPU has stopped for good"))
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
                Command::Run if !stopped => {
                    if let Some(stop) = self.run() {
                        stopped = true;
                        // The receiver lives as long as the process; if it is gone, so is everyone who would care.
                        let _ = self.around.stops.send(stop);
                        let _ = self.around.stopped.write(1);
                    }
                }
                Command::Save(done) if stopped => {
                    drop(done.send(Err(Error::Refused("the vCPU has stopped for good"))));
                }
                Command::Run => {}
                Command::Pause(done) => drop(done),
                Command::Save(done) => drop(done.send(save(&self.fd, &self.around.msr_indices))),
            }
        }
    }

    /// Runs until a pause (None) or the guest's end.
    fn run(&mut self) -> Option<Stop> {
        loop {
            self.fd.set_kvm_immediate_exit(0);
            // Clear the flag, then look at the queue; `pause` fills the queue, then sets the flag. Were the two steps here
            // reordered (they are a store and a load), a pause between them would find neither.
            fence(Ordering::SeqCst);
            match self.queue.try_recv() {
                Ok(Command::Run) | Err(TryRecvError::Empty) => {}
                Ok(Command::Pause(done)) => {
                    let stop = self.finish_pending_access();
                    drop(done);
                    return stop;
                }
                Ok(Command::Save(done)) => {
                    drop(done.send(Err(Error::Refused("a running vCPU cannot be saved: pause it first"))));
                }
                Err(TryRecvError::Disconnected) => return None,
            }
            match self.enter() {
                Next::Run | Next::Pause => {}
                Next::Stop(stop) => return Some(stop),
            }
        }
    }

    /// The last exit may have been an access that KVM completes on the next entry; with `immediate_exit` it does only that. An access that
    /// crosses a page is handed over in pieces, with an exit for each.
    fn finish_pending_access(&mut self) -> Option<Stop> {
        self.fd.set_kvm_immediate_exit(1);
        loop {
            match self.enter() {
                Next::Run => {}
                Next::Pause => return None,
                Next::Stop(stop) => return Some(stop),
            }
        }
    }

    fn enter(&mut self) -> Next {
        let bus = &self.around.bus;
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
        Next::Stop(Stop::Crash(self.describe(crash)))
    }

    fn describe(&mut self, exit: String) -> GuestCrash {
        crash::describe(&mut self.fd, &self.around.bus.memory, self.id, exit)
    }
}
