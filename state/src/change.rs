//! A change of a record: the only thing that a store takes for one that it has.

use crate::{Facts, Record, SandboxId, State};

/// What a record is: a change expects exactly this, and fails if it has become another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Stamp {
    /// Its state.
    pub state: State,
    /// Its generation.
    pub generation: u64,
}

impl std::fmt::Display for Stamp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, generation {}", self.state, self.generation)
    }
}

/// From a record as it was read to what it shall be. [`Record::on`] and [`Record::edit`] make it, so there is none that the table of
/// transitions does not have.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    expected: Stamp,
    next: Record,
}

impl Change {
    pub(crate) const fn new(expected: Stamp, next: Record) -> Self {
        Self { expected, next }
    }

    /// Which sandbox.
    #[must_use]
    pub const fn id(&self) -> &SandboxId {
        self.next.id()
    }

    /// What the record must be for the change to be taken.
    #[must_use]
    pub const fn expected(&self) -> Stamp {
        self.expected
    }

    /// What else changes with it.
    pub const fn facts(&mut self) -> &mut Facts {
        self.next.facts_mut()
    }

    /// The record as it shall be.
    #[must_use]
    pub const fn record(&self) -> &Record {
        &self.next
    }

    /// The record as it shall be.
    #[must_use]
    pub fn into_record(self) -> Record {
        self.next
    }

    /// Whether the record would be whole. Every store asks before it writes.
    ///
    /// # Errors
    /// What is missing.
    pub fn check(&self) -> Result<(), &'static str> {
        match self.next.state() {
            State::Hibernated if self.next.facts().saved.is_none() => Err("a hibernated sandbox needs its saved files"),
            State::Failed if self.next.facts().failure.is_none() => Err("a failed sandbox needs the reason"),
            _ => Ok(()),
        }
    }
}
