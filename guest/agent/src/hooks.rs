//! Language runtimes that have state of their own to repair (the protocol: [`stasis_guest_wire::hook`]).
//!
//! ```text
//!          connect                    a wake: reseed G                    ok G in time
//! runtime ─────────► registered ──────────────────────► asked ──────────────────────────► registered
//!                        │ hung up                        ├─ hung up ──► forgotten
//!                        └────────► forgotten             └─ too late ─► the repair fails
//! ```
//!
//! Accepting has a thread of its own, since a runtime that starts must not wait for a wake. A runtime that connected
//! right before the snapshot may not have been accepted by then: a wake looks for those first.

use std::{
    io,
    os::{
        fd::AsFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Instant,
};

use stasis_guest_wire::hook;

use crate::{
    console,
    ioctls::SEED,
    output::SMALL_STACK,
    poll::{PollFlags, wait, wait_until},
    socket::{receive, transmit},
};

/// More runtimes than this are not kept track of; there is then no repair.
const MOST: usize = 4096;

/// From this many on, those that hung up are looked for.
const SOME: usize = 64;

/// More than this is not an acknowledgement.
const LONGEST: usize = 4096;

/// Why runtimes were not repaired.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// One lives but has not answered.
    #[error("{name} did not answer in time")]
    Silent {
        /// What it calls itself.
        name: String,
    },
    /// One says too much.
    #[error("{name} does not speak the hooks' protocol")]
    Garbled {
        /// What it calls itself.
        name: String,
    },
    /// There are too many.
    #[error("more than {MOST} runtimes registered")]
    TooMany,
    /// They could not be waited for.
    #[error("cannot wait for the runtimes")]
    Poll(#[source] io::Error),
    /// There are no seeds to give.
    #[error("cannot make seeds")]
    Seeds(#[source] io::Error),
}

/// Everybody who registered.
#[derive(Debug)]
pub struct Hooks {
    listener: UnixListener,
    registered: Mutex<Registered>,
}

#[derive(Debug, Default)]
struct Registered {
    runtimes: Vec<Runtime>,
    too_many: bool,
    /// How many there were when the dead were last looked for.
    living: usize,
}

#[derive(Debug)]
struct Runtime {
    stream: UnixStream,
    name: String,
    heard: Vec<u8>,
}

impl Hooks {
    /// Listens at `path`.
    ///
    /// # Errors
    /// It cannot.
    pub fn listen(path: &Path) -> io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, registered: Mutex::default() })
    }

    /// Starts the thread that accepts.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn accept_in_background(self: &Arc<Self>) -> io::Result<()> {
        let hooks = Arc::clone(self);
        thread::Builder::new().name("hooks".into()).stack_size(SMALL_STACK).spawn(move || {
            loop {
                let result = wait(&[(hooks.listener.as_fd(), PollFlags::POLLIN)])
                    .and_then(|_| hooks.registered().accept(&hooks.listener));
                if let Err(error) = result {
                    // Runtimes may now go unnoticed.
                    hooks.registered().too_many = true;
                    console::say(format_args!("hooks: {error}"));
                    return;
                }
            }
        })?;
        Ok(())
    }

    /// Makes every registered runtime reseed, each with its own of `seeds`; how many did.
    ///
    /// # Errors
    /// One that lives did not by the deadline.
    pub fn reseed(
        &self,
        generation: u64,
        deadline: Instant,
        mut seeds: impl FnMut() -> io::Result<[u8; SEED]>,
    ) -> Result<u32, HookError> {
        let mut registered = self.registered();
        registered.accept(&self.listener).map_err(HookError::Poll)?;
        if registered.too_many {
            return Err(HookError::TooMany);
        }
        let mut asked = Vec::with_capacity(registered.runtimes.len());
        for runtime in registered.runtimes.drain(..) {
            let seed: String = seeds().map_err(HookError::Seeds)?.iter().map(|byte| format!("{byte:02x}")).collect();
            match transmit(&runtime.stream, hook::reseed(generation, &seed).as_bytes()) {
                // Its buffer is full of what it has not read: it lives, and will not answer.
                Ok(None) => return Err(HookError::Silent { name: runtime.name }),
                Ok(Some(_)) => asked.push(runtime),
                Err(_) => {}
            }
        }
        let mut done = Vec::with_capacity(asked.len());
        while !asked.is_empty() {
            let fds: Vec<_> = asked.iter().map(|runtime| (runtime.stream.as_fd(), PollFlags::POLLIN)).collect();
            let ready = wait_until(&fds, Some(deadline)).map_err(HookError::Poll)?;
            if ready.iter().all(|flags| flags.is_empty()) {
                let name = asked.swap_remove(0).label();
                return Err(HookError::Silent { name });
            }
            for (mut runtime, flags) in std::mem::take(&mut asked).into_iter().zip(ready) {
                match if flags.is_empty() { Heard::Nothing } else { runtime.listen(generation)? } {
                    Heard::Nothing => asked.push(runtime),
                    Heard::Acknowledgement => done.push(runtime),
                    Heard::End => {}
                }
            }
        }
        registered.runtimes = done;
        Ok(u32::try_from(registered.runtimes.len()).unwrap_or(u32::MAX))
    }

    fn registered(&self) -> MutexGuard<'_, Registered> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registered {
    /// Takes in all who knock.
    fn accept(&mut self, listener: &UnixListener) -> io::Result<()> {
        loop {
            match listener.accept() {
                Ok((stream, _)) => self.add(stream)?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn add(&mut self, stream: UnixStream) -> io::Result<()> {
        if self.runtimes.len() >= SOME.max(2 * self.living) {
            self.forget_the_dead()?;
        }
        if self.runtimes.len() >= MOST {
            self.too_many = true;
        } else {
            self.runtimes.push(Runtime { stream, name: String::new(), heard: Vec::new() });
        }
        Ok(())
    }

    fn forget_the_dead(&mut self) -> io::Result<()> {
        let fds: Vec<_> = self.runtimes.iter().map(|each| (each.stream.as_fd(), PollFlags::empty())).collect();
        let mut reported = wait_until(&fds, Some(Instant::now()))?.into_iter();
        self.runtimes.retain(|_| reported.next().is_none_or(|flags| flags.is_empty()));
        self.living = self.runtimes.len();
        Ok(())
    }
}

enum Heard {
    Nothing,
    Acknowledgement,
    End,
}

impl Runtime {
    /// Reads what it says: its name, once; acknowledgements of earlier lives, which do not count; that of this one.
    fn listen(&mut self, generation: u64) -> Result<Heard, HookError> {
        let mut buffer = [0; 256];
        match receive(&self.stream, &mut buffer) {
            Ok(None) => return Ok(Heard::Nothing),
            Ok(Some(0)) | Err(_) => return Ok(Heard::End),
            Ok(Some(count)) => self.heard.extend_from_slice(&buffer[..count]),
        }
        while let Some(end) = self.heard.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.heard.drain(..=end).collect();
            if line == hook::acknowledgement(generation).as_bytes() {
                return Ok(Heard::Acknowledgement);
            }
            if self.name.is_empty() {
                self.name = String::from_utf8_lossy(line.trim_ascii()).chars().take(80).collect();
            }
        }
        if self.heard.len() > LONGEST {
            return Err(HookError::Garbled { name: self.label() });
        }
        Ok(Heard::Nothing)
    }

    fn label(&self) -> String {
        if self.name.is_empty() { "a runtime without a name".into() } else { format!("runtime {:?}", self.name) }
    }
}

#[cfg(test)]
mod tests;
