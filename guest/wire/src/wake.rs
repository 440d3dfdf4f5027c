//! The conversation after a restore: identity repair, proved, then a connection to the function.
//!
//! ```text
//! node  → agent  Wake(Wake)
//! agent → node   Awake(Certificate)      then, on this same connection, raw bytes of the function's port
//!              | Refused { .. }          the VM is destroyed
//! ```
//!
//! Later connections open with [`FromNode::Forward`] and are answered by [`FromAgent::Forwarding`], or with [`FromNode::Pass`].
//! The agent refuses them until a wake of this generation has succeeded.

use alloc::{
    borrow::ToOwned,
    string::{String, ToString},
    vec::Vec,
};
use core::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use crate::exec::Exec;

/// First frame of every connection to the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromNode {
    /// Repair identity, prove it, then forward this connection to the function.
    Wake(Wake),
    /// Forward this connection to the function.
    Forward,
    /// The same without a word: the node has this life's certificate already ([`crate::page`]). What follows is the function's; a refusal closes
    /// the connection.
    Pass,
    /// Run a command beside the function ([`crate::exec`]).
    Exec(Exec),
    /// Say what the function has printed last.
    Logs,
}

/// The agent's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromAgent {
    /// Every step of the repair was done and checked; raw bytes follow.
    Awake(Certificate),
    /// Raw bytes follow.
    Forwarding,
    /// Parts of the command's output follow.
    Executing,
    /// Nothing follows.
    Logs {
        /// The last 64 KiB of the function's output.
        output: String,
    },
    /// This guest runs no commands. Nothing follows.
    NoCommands,
    /// Nothing follows.
    Refused {
        /// The step of the repair that failed, if it was the repair.
        step: Option<Step>,
        /// Why, in one line for a person.
        reason: String,
    },
}

/// What makes this VM different from every other one of its template.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wake {
    /// Counts the lives of this VM: 1 after the first restore.
    pub generation: u64,
    /// 64 bytes from the host's generator, in hex.
    pub entropy: String,
    /// The host's wall clock, nanoseconds since the Unix epoch.
    pub wall_clock_ns: u64,
    /// Host name to take.
    pub hostname: String,
    /// 32 hex digits for `/etc/machine-id`.
    pub machine_id: String,
    /// UUID that the guest shows as `/proc/sys/kernel/random/boot_id` and `/run/stasis/boot_nonce` from now on.
    pub boot_nonce: String,
}

impl fmt::Debug for Wake {
    /// Everything but the entropy, which has no place in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wake")
            .field("generation", &self.generation)
            .field("wall_clock_ns", &self.wall_clock_ns)
            .field("hostname", &self.hostname)
            .field("boot_nonce", &self.boot_nonce)
            .finish_non_exhaustive()
    }
}

/// One mandatory step of the repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// Host entropy credited (RNDADDENTROPY) and the kernel's generator reseeded (RNDRESEEDCRNG).
    Entropy,
    /// The wall clock was set to the host's.
    WallClock,
    /// The host name was set and read back.
    Hostname,
    /// `/etc/machine-id` was replaced and read back.
    MachineId,
    /// The boot nonce was replaced and read back.
    BootNonce,
    /// Every language runtime that registered a hook has reseeded and said so.
    Runtimes,
}

impl Step {
    /// All steps, in the order in which the agent does them.
    pub const ALL: [Self; 6] =
        [Self::Entropy, Self::WallClock, Self::Hostname, Self::MachineId, Self::BootNonce, Self::Runtimes];
}

/// A step that was done and checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof {
    /// Which one.
    pub step: Step,
    /// How long it took inside the guest.
    pub took: Duration,
}

/// What the agent repaired, as read back inside the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Certificate {
    /// The generation of the wake message.
    pub generation: u64,
    /// The kernel's own boot id: equal to the template's, or this VM was booted, not restored.
    pub kernel_boot_id: String,
    /// As read back from `/proc/sys/kernel/random/boot_id`.
    pub boot_nonce: String,
    /// As read back.
    pub hostname: String,
    /// As read back.
    pub machine_id: String,
    /// How far the guest's wall clock lagged before it was set (negative: it ran ahead), nanoseconds.
    pub clock_lag_ns: i64,
    /// Runtimes that reseeded.
    pub runtimes: u32,
    /// The steps, each once, in the order done.
    pub proofs: Vec<Proof>,
}

/// Why a certificate does not open the gate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unproved {
    /// A field reads back other than what the wake message asked for.
    #[error("the guest shows {field} {found:?} where {expected:?} was ordered")]
    Mismatch {
        /// Which field.
        field: &'static str,
        /// What the guest shows.
        found: String,
        /// What it was told.
        expected: String,
    },
    /// A mandatory step has no proof.
    #[error("the guest did not prove the repair step {0:?}")]
    Missing(Step),
}

impl Certificate {
    /// Checks the certificate against the wake message and the template's kernel boot id.
    ///
    /// # Errors
    /// The first thing that was not proved; the VM must then not be used.
    pub fn verify(&self, wake: &Wake, template_boot_id: &str) -> Result<(), Unproved> {
        let pairs = [
            ("generation", self.generation.to_string(), wake.generation.to_string()),
            ("kernel boot id", self.kernel_boot_id.clone(), template_boot_id.to_owned()),
            ("boot nonce", self.boot_nonce.clone(), wake.boot_nonce.clone()),
            ("hostname", self.hostname.clone(), wake.hostname.clone()),
            ("machine id", self.machine_id.clone(), wake.machine_id.clone()),
        ];
        for (field, found, expected) in pairs {
            if found != expected {
                return Err(Unproved::Mismatch { field, found, expected });
            }
        }
        match Step::ALL.into_iter().find(|step| !self.proofs.iter().any(|proof| proof.step == *step)) {
            Some(step) => Err(Unproved::Missing(step)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wake() -> Wake {
        Wake {
            generation: 1,
            entropy: "00".repeat(64),
            wall_clock_ns: 1,
            hostname: "vm-1".into(),
            machine_id: "a".repeat(32),
            boot_nonce: "nonce".into(),
        }
    }

    fn certificate() -> Certificate {
        Certificate {
            generation: 1,
            kernel_boot_id: "template".into(),
            boot_nonce: "nonce".into(),
            hostname: "vm-1".into(),
            machine_id: "a".repeat(32),
            clock_lag_ns: 0,
            runtimes: 0,
            proofs: Step::ALL.map(|step| Proof { step, took: Duration::ZERO }).to_vec(),
        }
    }

    #[test]
    fn a_full_certificate_opens_the_gate() {
        assert_eq!(certificate().verify(&wake(), "template"), Ok(()));
    }

    #[test]
    fn each_missing_step_keeps_it_shut() {
        for step in Step::ALL {
            let mut partial = certificate();
            partial.proofs.retain(|proof| proof.step != step);
            assert_eq!(partial.verify(&wake(), "template"), Err(Unproved::Missing(step)));
        }
    }

    #[test]
    fn a_booted_vm_is_not_a_restored_one() {
        let error = certificate().verify(&wake(), "another boot").unwrap_err();
        assert!(matches!(error, Unproved::Mismatch { field: "kernel boot id", .. }));
    }

    #[test]
    fn entropy_stays_out_of_logs() {
        assert!(!format!("{:?}", wake()).contains("0000"));
    }
}
