//! The gate between the node and the function. It fails closed.
//!
//! ```text
//!             wake, all steps proved
//!   closed ───────────────────────────► open(generation)
//!     ▲  ▲ wake, a step failed               │
//!     │  └───────────────────────────────────┤
//!     └── a wake of a later generation begins ┘      (and ends in one of the two)
//! ```
//!
//! A wake is accepted only with a generation above every one seen, failed ones included: a VM whose repair failed is
//! not repaired, it is destroyed. The system's effects are behind [`Effects`], so that what keeps the gate closed can
//! be tested one step at a time.

use std::{
    io,
    time::{Duration, Instant},
};

use stasis_guest_wire::wake::{Certificate, FromAgent, Proof, Step, Wake};

use crate::{console, hooks::HookError, ioctls::SEED};

/// How far from the ordered time a clock may be that was just set.
const CLOCK_TOLERANCE: u64 = 1_000_000_000;

/// Why a step of the repair failed.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    /// The order itself makes no sense.
    #[error("the wake message has {0}")]
    Order(&'static str),
    /// The system refused.
    #[error("cannot {what}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Its answer.
        #[source]
        source: io::Error,
    },
    /// It reads back differently.
    #[error("{what} reads back {found:?} where {expected:?} was written")]
    ReadBack {
        /// What was written.
        what: &'static str,
        /// What is there.
        found: String,
        /// What should be.
        expected: String,
    },
    /// A runtime did not take part.
    #[error("a runtime did not reseed")]
    Runtimes(#[from] HookError),
}

/// A clock that was set.
#[derive(Debug, Clone, Copy)]
pub struct ClockSet {
    /// How far it lagged before, nanoseconds.
    pub lag_ns: i64,
    /// What it showed right after.
    pub now_ns: u64,
}

/// What a repair does to the system. Each answers with what it read back.
pub trait Effects {
    /// Credits the seed to the kernel's generator and reseeds that.
    ///
    /// # Errors
    /// Either was refused.
    fn entropy(&mut self, seed: &[u8; SEED]) -> Result<(), RepairError>;
    /// Sets the wall clock.
    ///
    /// # Errors
    /// It was refused.
    fn wall_clock(&mut self, now_ns: u64) -> Result<ClockSet, RepairError>;
    /// Sets the host name.
    ///
    /// # Errors
    /// It was refused.
    fn hostname(&mut self, name: &str) -> Result<String, RepairError>;
    /// Replaces the machine id.
    ///
    /// # Errors
    /// It was refused.
    fn machine_id(&mut self, id: &str) -> Result<String, RepairError>;
    /// Replaces the boot nonce.
    ///
    /// # Errors
    /// It was refused.
    fn boot_nonce(&mut self, nonce: &str) -> Result<String, RepairError>;
    /// Makes every registered runtime reseed; how many did.
    ///
    /// # Errors
    /// One that lives did not.
    fn runtimes(&mut self, generation: u64) -> Result<u32, RepairError>;
    /// Shows the generation to whoever in the guest wants to know.
    ///
    /// # Errors
    /// It was refused.
    fn publish(&mut self, generation: u64) -> Result<(), RepairError>;
    /// The kernel's own boot id, behind what is shown instead.
    ///
    /// # Errors
    /// It cannot be read.
    fn kernel_boot_id(&mut self) -> Result<String, RepairError>;
}

/// The gate.
#[derive(Debug)]
pub struct Gate<E> {
    effects: E,
    /// The highest generation seen.
    last: u64,
    open: bool,
}

impl<E: Effects> Gate<E> {
    /// A closed one.
    pub fn new(effects: E) -> Self {
        Self { effects, last: 0, open: false }
    }

    /// The generation for which it is open.
    #[must_use]
    pub fn generation(&self) -> Option<u64> {
        self.open.then_some(self.last)
    }

    /// The answer to a connection that wants to pass.
    #[must_use]
    pub fn forward(&self) -> FromAgent {
        if self.open { FromAgent::Forwarding } else { refused(None, "identity has not been repaired") }
    }

    /// Closes, repairs, and opens if every step was proved.
    pub fn wake(&mut self, wake: &Wake) -> FromAgent {
        if wake.generation <= self.last {
            // Says nothing about the life that is being lived.
            let reason = format!("generation {} is not above {}", wake.generation, self.last);
            return FromAgent::Refused { step: None, reason };
        }
        self.open = false;
        self.last = wake.generation;
        match self.repair(wake) {
            Ok(certificate) => {
                self.open = true;
                FromAgent::Awake(certificate)
            }
            Err((step, error)) => refused(step, &console::chain(&error)),
        }
    }

    fn repair(&mut self, wake: &Wake) -> Result<Certificate, (Option<Step>, RepairError)> {
        let effects = &mut self.effects;
        let mut proofs = Vec::with_capacity(Step::ALL.len());
        prove(&mut proofs, Step::Entropy, || effects.entropy(&seed(&wake.entropy)?))?;
        let clock_lag_ns = prove(&mut proofs, Step::WallClock, || {
            let set = effects.wall_clock(wake.wall_clock_ns)?;
            if set.now_ns.abs_diff(wake.wall_clock_ns) > CLOCK_TOLERANCE {
                return Err(different("the wall clock", set.now_ns.to_string(), wake.wall_clock_ns.to_string()));
            }
            Ok(set.lag_ns)
        })?;
        let hostname = prove(&mut proofs, Step::Hostname, || {
            if wake.hostname.is_empty() || wake.hostname.len() > 64 {
                return Err(RepairError::Order("no host name of 1 to 64 bytes"));
            }
            same("the host name", effects.hostname(&wake.hostname)?, &wake.hostname)
        })?;
        let machine_id = prove(&mut proofs, Step::MachineId, || {
            if !hex(&wake.machine_id, 32) {
                return Err(RepairError::Order("no machine id of 32 hex digits"));
            }
            same("the machine id", effects.machine_id(&wake.machine_id)?, &wake.machine_id)
        })?;
        let boot_nonce = prove(&mut proofs, Step::BootNonce, || {
            if wake.boot_nonce.len() != 36 || !hex(&wake.boot_nonce.replace('-', ""), 32) {
                return Err(RepairError::Order("no UUID for a boot nonce"));
            }
            same("the boot nonce", effects.boot_nonce(&wake.boot_nonce)?, &wake.boot_nonce)
        })?;
        let runtimes = prove(&mut proofs, Step::Runtimes, || effects.runtimes(wake.generation))?;
        effects.publish(wake.generation).map_err(|error| (None, error))?;
        let kernel_boot_id = effects.kernel_boot_id().map_err(|error| (None, error))?;
        let generation = wake.generation;
        Ok(Certificate { generation, kernel_boot_id, boot_nonce, hostname, machine_id, clock_lag_ns, runtimes, proofs })
    }
}

fn prove<T>(
    proofs: &mut Vec<Proof>,
    step: Step,
    act: impl FnOnce() -> Result<T, RepairError>,
) -> Result<T, (Option<Step>, RepairError)> {
    let started = Instant::now();
    let value = act().map_err(|error| (Some(step), error))?;
    let took: Duration = started.elapsed();
    proofs.push(Proof { step, took });
    Ok(value)
}

fn refused(step: Option<Step>, reason: &str) -> FromAgent {
    FromAgent::Refused { step, reason: reason.to_owned() }
}

fn same(what: &'static str, found: String, expected: &str) -> Result<String, RepairError> {
    if found == expected { Ok(found) } else { Err(different(what, found, expected.to_owned())) }
}

fn different(what: &'static str, found: String, expected: String) -> RepairError {
    RepairError::ReadBack { what, found, expected }
}

fn hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn seed(text: &str) -> Result<[u8; SEED], RepairError> {
    let wrong = || RepairError::Order("no entropy of 64 bytes in hex");
    if !hex(text, 2 * SEED) {
        return Err(wrong());
    }
    let mut seed = [0; SEED];
    for (byte, digits) in seed.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let digits = str::from_utf8(digits).map_err(|_| wrong())?;
        *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong())?;
    }
    Ok(seed)
}

#[cfg(test)]
pub(crate) mod tests;
