//! What changes about a sandbox beside its state.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Event, Metadata, Name, NodeId, Timestamp, time::ms};

/// Most holds at once: they are named by people and programs, and a record stays small.
const MOST_HOLDS: usize = 32;

/// A template at one version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Template {
    /// Its name.
    pub name: Name,
    /// Which build of it.
    pub version: Name,
}

/// A process that cannot be mistaken for a later one with the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// When it started, in clock ticks since boot: field 22 of `/proc/PID/stat` (proc(5)).
    pub started: u64,
}

/// Who acts on a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Owner {
    /// The node. Only it makes transitions; anyone may kill.
    pub node: NodeId,
    /// The VM's process on that node, where there is one.
    pub process: Option<Process>,
    /// Until when the node owns it without saying so again. None on a node that shares its store with no other.
    pub lease_until: Option<Timestamp>,
}

/// What a deadline does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    /// The sandbox is paused.
    Pause,
    /// It is killed.
    Kill,
}

/// The rules by which it lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lifetime {
    /// Running time that it was made with, and gets again when it is resumed with none left. None: no deadline.
    #[serde(rename = "timeout_ms", with = "ms::option")]
    pub timeout: Option<Duration>,
    /// What the deadline does.
    pub on_timeout: OnTimeout,
    /// Whether any request brings it back.
    pub auto_resume: bool,
    /// How long it is idle before it is paused. None: never for that.
    #[serde(rename = "pause_after_ms", with = "ms::option")]
    pub pause_after: Option<Duration>,
    /// How long it is suspended before it is hibernated. None: only when memory is short.
    #[serde(rename = "hibernate_after_ms", with = "ms::option")]
    pub hibernate_after: Option<Duration>,
}

/// When a sandbox's time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum Deadline {
    /// The clock runs until then.
    At(Timestamp),
    /// The clock stands still, with so much left.
    Left(#[serde(with = "ms")] Duration),
}

/// Keeps a sandbox from being paused for idleness.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hold {
    /// Whose hold it is.
    pub name: Name,
    /// Until when. None: until it is released.
    pub until: Option<Timestamp>,
}

/// Too many holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a sandbox has at most {MOST_HOLDS} holds: release one, or use one of the same name again")]
pub struct HoldsError;

/// Holds, at most one of each name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Hold>", into = "Vec<Hold>")]
pub struct Holds(Vec<Hold>);

impl Holds {
    /// Adds a hold, or gives the one of this name another end.
    ///
    /// # Errors
    /// [`HoldsError`] if there are too many.
    pub fn set(&mut self, hold: Hold) -> Result<(), HoldsError> {
        let full = self.0.len() >= MOST_HOLDS;
        match self.0.iter_mut().find(|there| there.name == hold.name) {
            Some(there) => *there = hold,
            None if full => return Err(HoldsError),
            None => self.0.push(hold),
        }
        Ok(())
    }

    /// Takes a hold away; whether it was there.
    pub fn release(&mut self, name: &Name) -> bool {
        let before = self.0.len();
        self.0.retain(|hold| hold.name != *name);
        self.0.len() < before
    }

    /// Those that hold at that time.
    pub fn active(&self, now: Timestamp) -> impl Iterator<Item = &Hold> {
        self.0.iter().filter(move |hold| hold.until.is_none_or(|until| until > now))
    }
}

impl TryFrom<Vec<Hold>> for Holds {
    type Error = HoldsError;

    fn try_from(holds: Vec<Hold>) -> Result<Self, HoldsError> {
        let mut all = Self::default();
        holds.into_iter().try_for_each(|hold| all.set(hold))?;
        Ok(all)
    }
}

impl From<Holds> for Vec<Hold> {
    fn from(holds: Holds) -> Self {
        holds.0
    }
}

/// A hibernated sandbox's files, by name, in the node's folder for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Saved {
    /// Its memory, as it differs from the template's.
    pub memory: Name,
    /// Its machine's state.
    pub machine: Name,
    /// Its root disk.
    pub disk: Name,
}

/// What changes about a sandbox beside its state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// Who acts on it.
    pub owner: Option<Owner>,
    /// The rules by which it lives.
    pub lifetime: Lifetime,
    /// When its time is over.
    pub deadline: Option<Deadline>,
    /// What keeps it from being paused for idleness.
    pub holds: Holds,
    /// Since when it was idle when it was paused for that. Only the owner knows it of a running one.
    pub idle_since: Option<Timestamp>,
    /// What it is brought back from when it is hibernated.
    pub saved: Option<Saved>,
    /// Why it failed, in a sentence.
    pub failure: Option<String>,
    /// What its caller noted on it.
    pub metadata: Metadata,
}

impl Facts {
    /// What a new sandbox has: no owner, no holds, and a clock that starts when it does.
    #[must_use]
    pub fn new(lifetime: Lifetime, metadata: Metadata) -> Self {
        Self {
            owner: None,
            lifetime,
            deadline: lifetime.timeout.map(Deadline::Left),
            holds: Holds::default(),
            idle_since: None,
            saved: None,
            failure: None,
            metadata,
        }
    }

    /// What an event changes by itself: the clock runs while the sandbox does.
    pub(super) fn follow(&mut self, event: Event, now: Timestamp) {
        match event {
            Event::Started | Event::Resumed => {
                if let Some(Deadline::Left(left)) = self.deadline {
                    // With nothing left it would be paused again before it could answer, so it gets its time anew.
                    let again = if left.is_zero() { self.lifetime.timeout } else { Some(left) };
                    self.deadline = again.map(|left| Deadline::At(now.plus(left)));
                }
                self.idle_since = None;
                self.saved = None;
            }
            Event::Paused | Event::Broke => {
                if let Some(Deadline::At(at)) = self.deadline {
                    self.deadline = Some(Deadline::Left(at.since(now)));
                }
            }
            Event::Hibernated => {
                if let Some(owner) = &mut self.owner {
                    owner.process = None;
                }
            }
            _ => {}
        }
    }
}
