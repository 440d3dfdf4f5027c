//! The thread of a vCPU: waits for commands, and runs the guest.

use std::sync::{
    Arc, Mutex,
    atomic::{Ordering, fence},
    mpsc::{Receiver, Sender, TryRecvError},
};

use kvm_ioctls::{VcpuExit, VcpuFd};
use stasis_vmm_api::{GuestCrash, Stop};

use super::{Core, Surroundings, crash};
use crate::bus::{Access, Bus, lock};

pub(super) enum Command {
    Run(Arc<Bus>),
    /// Answered by dropping it.
    Pause(Sender<()>),
}

pub(super) struct Thread {
    pub(super) id: u8,
    pub(super) core: Arc<Mutex<Core>>,
    pub(super) around: Surroundings,
    pub(super) queue: Receiver<Command>,
}

impl Thread {
    /// Paused, running, paused, … until the handle is gone. A vCPU that has stopped for good goes on hearing commands, and does none.
    pub(super) fn live(self) {
        while let Ok(command) = self.queue.recv() {
            match command {
                Command::Run(bus) => self.run(&bus),
                Command::Pause(done) => drop(done),
            }
        }
    }

    /// Runs until a pause or the guest's end.
    fn run(&self, bus: &Bus) {
        let mut core = lock(&self.core);
        if core.has_stopped {
            return;
        }
        let End { stop, paused } = Running { id: self.id, fd: &mut core.fd, queue: &self.queue, bus }.run();
        core.has_stopped = stop.is_some();
        drop(core);
        if let Some(stop) = stop {
            // The receiver lives as long as the process; if it is gone, so is everyone who would care.
            let _ = self.around.stops.send((usize::from(self.id), stop));
            let _ = self.around.stopped.write(1);
        }
        // Now whoever waits for the pause can have the descriptor.
        drop(paused);
    }
}

/// A vCPU whose descriptor is this thread's.
struct Running<'a> {
    id: u8,
    fd: &'a mut VcpuFd,
    queue: &'a Receiver<Command>,
    bus: &'a Bus,
}

/// Why a vCPU runs no more.
#[derive(Default)]
struct End {
    /// The guest's end.
    stop: Option<Stop>,
    /// Whoever waits for the pause.
    paused: Option<Sender<()>>,
}

enum Next {
    Run,
    Pause,
    Stop(Stop),
}

impl Running<'_> {
    fn run(mut self) -> End {
        // Of an access that KVM has handed over and not completed.
        let mut is_pending = false;
        loop {
            self.fd.set_kvm_immediate_exit(0);
            // Clear the flag, then look at the queue; `pause` fills the queue, then sets the flag. Were the two steps here
            // reordered (they are a store and a load), a pause between them would find neither.
            fence(Ordering::SeqCst);
            match self.queue.try_recv() {
                Ok(Command::Run(_)) | Err(TryRecvError::Empty) => {}
                Ok(Command::Pause(done)) => {
                    let stop = if is_pending { self.finish_pending_access() } else { None };
                    return End { stop, paused: Some(done) };
                }
                Err(TryRecvError::Disconnected) => return End::default(),
            }
            match self.enter() {
                Next::Run => is_pending = true,
                // KVM completes what is pending before it looks at `immediate_exit` or a signal.
                Next::Pause => is_pending = false,
                Next::Stop(stop) => return End { stop: Some(stop), paused: None },
            }
        }
    }

    /// The last exit was an access that KVM completes on the next entry; with `immediate_exit` it does only that. An access that
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
        let crash = match self.fd.run() {
            Ok(VcpuExit::IoIn(port, data)) => {
                self.bus.port_in(port, data);
                return Next::Run;
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                return match self.bus.port_out(port, data) {
                    Access::Done => Next::Run,
                    Access::Reset => Next::Stop(Stop::Shutdown),
                };
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                self.bus.mmio_read(address, data);
                return Next::Run;
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                self.bus.mmio_write(address, data);
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
        crash::describe(self.fd, &self.bus.memory, self.id, exit)
    }
}
