//! The record of a sandbox: everything that must survive the processes that act on it.

mod codec;
mod facts;
#[cfg(test)]
pub(crate) mod tests;

pub use codec::{DecodeError, RECORD_VERSION};
pub use facts::{Deadline, Facts, Hold, Holds, HoldsError, Lifetime, OnTimeout, Owner, Process, Saved, Template};
use serde::{Deserialize, Serialize};

use crate::{Change, Event, Illegal, SandboxId, Stamp, State, Tenant, Timestamp, transition};

/// One sandbox.
///
/// Who it is never changes; state and generation change only by a [`Change`]; [`Facts`] change with one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    version: u32,
    id: SandboxId,
    tenant: Tenant,
    template: Template,
    state: State,
    generation: u64,
    created_at: Timestamp,
    entered_at: Timestamp,
    changed_at: Timestamp,
    facts: Facts,
}

/// What a new record is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct New {
    /// What it is called.
    pub id: SandboxId,
    /// Whose it is, from now to its end.
    pub tenant: Tenant,
    /// What it is made of.
    pub template: Template,
    /// The rest.
    pub facts: Facts,
}

impl Record {
    /// The record of a sandbox that is about to be made: creating, generation 1.
    #[must_use]
    pub fn new(new: New, now: Timestamp) -> Self {
        Self {
            version: RECORD_VERSION,
            id: new.id,
            tenant: new.tenant,
            template: new.template,
            state: State::Creating,
            generation: 1,
            created_at: now,
            entered_at: now,
            changed_at: now,
            facts: new.facts,
        }
    }

    /// What it is called.
    #[must_use]
    pub const fn id(&self) -> &SandboxId {
        &self.id
    }

    /// Whose it is.
    #[must_use]
    pub const fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// What it is made of.
    #[must_use]
    pub const fn template(&self) -> &Template {
        &self.template
    }

    /// What it is.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// How often the record was changed. Every change raises it, so it tells a present record from a stale one.
    #[must_use]
    pub const fn generation(&self) -> u64 {
        self.generation
    }

    /// What a change of this very record expects.
    #[must_use]
    pub const fn stamp(&self) -> Stamp {
        Stamp { state: self.state, generation: self.generation }
    }

    /// When it was made.
    #[must_use]
    pub const fn created_at(&self) -> Timestamp {
        self.created_at
    }

    /// Since when it has been in its state.
    #[must_use]
    pub const fn entered_at(&self) -> Timestamp {
        self.entered_at
    }

    /// When it was last changed.
    #[must_use]
    pub const fn changed_at(&self) -> Timestamp {
        self.changed_at
    }

    /// The rest.
    #[must_use]
    pub const fn facts(&self) -> &Facts {
        &self.facts
    }

    /// When its time is over. None while the clock stands still, and without a deadline.
    #[must_use]
    pub const fn ends_at(&self) -> Option<Timestamp> {
        match self.facts.deadline {
            Some(Deadline::At(at)) => Some(at),
            _ => None,
        }
    }

    /// The change that an event makes. Nothing is changed until a store has taken it.
    ///
    /// # Errors
    /// [`Illegal`] if the state does not allow it.
    pub fn on(&self, event: Event, now: Timestamp) -> Result<Change, Illegal> {
        let mut next = self.raised(now);
        next.state = transition::next(self.state, event)?;
        if next.state != self.state {
            next.entered_at = now;
        }
        next.facts.follow(event, now);
        Ok(Change::new(self.stamp(), next))
    }

    /// A change of facts that leaves the state as it is.
    #[must_use]
    pub fn edit(&self, now: Timestamp) -> Change {
        Change::new(self.stamp(), self.raised(now))
    }

    fn raised(&self, now: Timestamp) -> Self {
        let mut next = self.clone();
        // 2⁶³ changes of one record do not happen; at the end of the numbers it would stop being changed rather than start again.
        next.generation = self.generation.saturating_add(1);
        next.changed_at = now;
        next
    }

    pub(crate) const fn facts_mut(&mut self) -> &mut Facts {
        &mut self.facts
    }
}
