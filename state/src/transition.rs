//! The table of transitions: every state that a sandbox can be in, every event that can meet it, and where that leads.
//!
//! ```text
//!  creating ──started──▶ running ──pause begun──▶ pausing ──paused──▶ suspended ──hibernate begun──▶ hibernating
//!                         ▲   ▲                      │                 ▲ ▲  │                        │      │
//!                         │   └─────still running────┘                 │ │  │        still suspended │      │ hibernated
//!                         │                                            │ └──┼────────────────────────┘      ▼
//!                      resumed                       still suspended   │    │ resume begun          hibernated
//!                         └───────────────────────────── resuming ─────┘◀───┴────── resume begun ────────┘  ▲
//!                                                           └────────────────────────── still hibernated ───┘
//!  any but failed, killing, gone ──broke──▶ failed
//!  any but gone ──kill──▶ killing ──removed──▶ gone
//! ```

use std::fmt;

use serde::{Deserialize, Serialize};

/// Defines an enum with a list of its values and their names, so that no table can forget one.
macro_rules! listed {
    ($(#[$doc:meta])* $type:ident { $($(#[$vdoc:meta])* $variant:ident = $name:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum $type { $($(#[$vdoc])* #[serde(rename = $name)] $variant,)+ }

        impl $type {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// As it is written in records, answers and metrics.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)+ }
            }

            /// The one of this name.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|one| one.name() == name)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

listed! {
    /// What a sandbox is.
    State {
        /// Its VM is being made; it has not run yet.
        Creating = "creating",
        /// Its vCPUs run.
        Running = "running",
        /// It is about to be paused, or its vCPUs have just stopped. No request is in it.
        Pausing = "pausing",
        /// Its vCPUs stand still; its memory is in RAM.
        Suspended = "suspended",
        /// Its memory is being written to disk. It is in RAM too, still.
        Hibernating = "hibernating",
        /// Its memory is on disk; it has no process.
        Hibernated = "hibernated",
        /// It is being brought back, once for all who wait.
        Resuming = "resuming",
        /// It is being removed. Nothing brings it back.
        Killing = "killing",
        /// Nothing of it is left, and its record leaves the store.
        Gone = "gone",
        /// Its VM ended or cannot be brought back; only its record is left, until someone kills it.
        Failed = "failed",
    }
}

listed! {
    /// What happens to a sandbox. Those that end in *begun*, and *kill*, are intentions, written before anything is done; all others
    /// are observations, written after it was.
    Event {
        /// Its VM runs for the first time.
        Started = "started",
        /// Whoever owns it will stop its vCPUs.
        PauseBegun = "pause-begun",
        /// The pause was called off; its vCPUs run.
        StillRunning = "still-running",
        /// Its vCPUs stand still.
        Paused = "paused",
        /// Its memory will be written to disk.
        HibernateBegun = "hibernate-begun",
        /// Its memory is on disk, all of it.
        Hibernated = "hibernated",
        /// Hibernating or resuming was called off; it stands still in RAM as before.
        StillSuspended = "still-suspended",
        /// It will be brought back.
        ResumeBegun = "resume-begun",
        /// Its vCPUs run again.
        Resumed = "resumed",
        /// Resuming failed without harm; it is on disk as before.
        StillHibernated = "still-hibernated",
        /// Its VM ended, or cannot be brought back.
        Broke = "broke",
        /// It is to be removed.
        Kill = "kill",
        /// All of it was removed.
        Removed = "removed",
    }
}

/// An event that this state does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a sandbox that is {state} cannot take the event {event}; it could take: {}", allowed(*state))]
pub struct Illegal {
    /// What the sandbox is.
    pub state: State,
    /// What was asked of it.
    pub event: Event,
}

fn allowed(state: State) -> String {
    let names: Vec<_> = allowed_in(state).map(Event::name).collect();
    if names.is_empty() { "nothing, it is gone".to_owned() } else { names.join(", ") }
}

/// The events that a state allows.
pub fn allowed_in(state: State) -> impl Iterator<Item = Event> {
    Event::ALL.iter().copied().filter(move |event| next(state, *event).is_ok())
}

/// The table.
///
/// # Errors
/// [`Illegal`] for an event that the state does not allow.
pub const fn next(state: State, event: Event) -> Result<State, Illegal> {
    use Event as E;
    use State as S;
    Ok(match (state, event) {
        (S::Creating, E::Started) | (S::Pausing, E::StillRunning) | (S::Resuming, E::Resumed) => S::Running,
        (S::Running, E::PauseBegun) => S::Pausing,
        (S::Pausing, E::Paused) | (S::Hibernating | S::Resuming, E::StillSuspended) => S::Suspended,
        (S::Suspended, E::HibernateBegun) => S::Hibernating,
        (S::Hibernating, E::Hibernated) | (S::Resuming, E::StillHibernated) => S::Hibernated,
        (S::Suspended | S::Hibernated, E::ResumeBegun) => S::Resuming,
        (
            S::Creating | S::Running | S::Pausing | S::Suspended | S::Hibernating | S::Hibernated | S::Resuming,
            E::Broke,
        ) => S::Failed,
        // A second kill is legal, and changes nothing but the generation.
        (
            S::Creating
            | S::Running
            | S::Pausing
            | S::Suspended
            | S::Hibernating
            | S::Hibernated
            | S::Resuming
            | S::Failed
            | S::Killing,
            E::Kill,
        ) => S::Killing,
        (S::Killing, E::Removed) => S::Gone,
        _ => return Err(Illegal { state, event }),
    })
}

#[cfg(test)]
mod tests;
