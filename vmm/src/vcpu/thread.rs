//! The thread of a vCPU: waits for commands, and runs the guest.

use std::{
    hint,
    sync::{
        Arc, Mutex,
        atomic::{Ordering, fence},
        mpsc::{Receiver, RecvError, Sender, TryRecvError},
    },
    time::{Duration, Instant},
};

use kvm_ioctls::{VcpuExit, VcpuFd};
use stasis_vmm_api::{GuestCrash, Stop};

use super::{Core, Surroundings, crash};
use crate::bus::{Access, Bus, lock};

/// How long a thread that was paused for a moment keeps its CPU: the moment is some tenths of a millisecond.
const MOMENT: Duration = Duration::from_millis(1);

pub(super) enum Command {
    Run(Arc<Bus>),
    Pause(Pause),
}

pub(super) struct Pause {
    /// Answered by dropping it.
    pub(super) done: Sender<()>,
    pub(super) lasts: Lasts,
}

/// How long a pause will be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lasts {
    /// The guest waits for its end: the thread keeps the CPU on which the guest would run, since being woken there would take as long again.
    AMoment,
    /// The thread sleeps.
    Long,
}

/// The next message, looked for during `patience` before the thread sleeps until there is one.
pub(super) fn receive_soon<T>(queue: &Receiver<T>, patience: Duration) -> Result<T, RecvError> {
    let begun = Instant::now();
    while begun.elapsed() < patience {
        match queue.try_recv() {
            Ok(message) => return Ok(message),
            Err(TryRecvError::Disconnected) => return Err(RecvError),
            Err(TryRecvError::Empty) => hint::spin_loop(),
        }
    }
    queue.recv()
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
        let mut next = self.queue.recv();
        while let Ok(command) = next {
            let pause = match command {
                Command::Run(bus) => self.run(&bus),
                Command::Pause(pause) => Some(pause),
            };
            let lasts = pause.map_or(Lasts::Long, |Pause { done, lasts }| {
                // Now whoever waits for the pause can have the descriptor.
                drop(done);
                lasts
            });
            next = match lasts {
                Lasts::AMoment => receive_soon(&self.queue, MOMENT),
                Lasts::Long => self.queue.recv(),
            };
        }
    }

    /// Runs until a pause, which is returned, or the guest's end.
    fn run(&self, bus: &Bus) -> Option<Pause> {
        let mut core = lock(&self.core);
        if core.has_stopped {
            return None;
        }
        let End { stop, pause } = Running { id: self.id, fd: &mut core.fd, queue: &self.queue, bus }.run();
        core.has_stopped = stop.is_some();
        drop(core);
        if let Some(stop) = stop {
            // The receiver lives as long as the process; if it is gone, so is everyone who would care.
            let _ = self.around.stops.send((usize::from(self.id), stop));
            let _ = self.around.stopped.write(1);
        }
        pause
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
    pause: Option<Pause>,
}

/// Nobody can command this vCPU any more.
struct HandleGone;

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
            match self.next() {
                Ok(None) => {}
                Ok(Some(pause)) => {
                    let stop = if is_pending { self.finish_pending_access() } else { None };
                    return End { stop, pause: Some(pause) };
                }
                Err(HandleGone) => return End::default(),
            }
            match self.enter() {
                Next::Run => is_pending = true,
                // KVM completes what is pending before it looks at `immediate_exit` or a signal.
                Next::Pause => is_pending = false,
                Next::Stop(stop) => return End { stop: Some(stop), pause: None },
            }
        }
    }

    /// A pause, if one is in the queue. All that is before it is taken out: its kick has been used up, so there is no other look at the queue.
    fn next(&self) -> Result<Option<Pause>, HandleGone> {
        loop {
            match self.queue.try_recv() {
                // It runs already.
                Ok(Command::Run(_)) => {}
                Ok(Command::Pause(pause)) => return Ok(Some(pause)),
                Err(TryRecvError::Empty) => return Ok(None),
                Err(TryRecvError::Disconnected) => return Err(HandleGone),
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

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    #[test]
    fn a_message_is_received_however_late_it_comes() {
        let (sender, queue) = mpsc::channel();
        sender.send(1).unwrap();
        assert_eq!(receive_soon(&queue, MOMENT), Ok(1));
        let later = thread::spawn(move || sender.send(2));
        assert_eq!(receive_soon(&queue, Duration::ZERO), Ok(2), "after patience is over");
        later.join().unwrap().unwrap();
        assert_eq!(receive_soon(&queue, MOMENT), Err(RecvError));
        assert_eq!(receive_soon(&queue, Duration::ZERO), Err(RecvError));
    }
}
