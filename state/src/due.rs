//! What a record asks to be done at a time, without any request.

use std::time::Duration;

use crate::{OnTimeout, Record, State, Timestamp};

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Duty {
    /// Its time is over.
    Timeout(OnTimeout),
    /// It has been suspended for long enough.
    Hibernate,
}

/// The next thing, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Due {
    /// When.
    pub at: Timestamp,
    /// What.
    pub duty: Duty,
}

impl Record {
    /// What is next for it. Nothing in the midst of a transition: what follows is known when that ends. Pausing for idleness is not
    /// here, since only the owner of a running sandbox knows how long it has been idle ([`crate::Session::wake_at`]).
    #[must_use]
    pub fn due(&self) -> Option<Due> {
        let lifetime = &self.facts().lifetime;
        match self.state() {
            State::Running => self.ends_at().map(|at| Due { at, duty: Duty::Timeout(lifetime.on_timeout) }),
            State::Suspended => lifetime
                .hibernate_after
                .map(|after: Duration| Due { at: self.entered_at().plus(after), duty: Duty::Hibernate }),
            _ => None,
        }
    }
}
