//! The published definition of idle: docs/api.md has it word for word. A running sandbox is idle when all of this is so:
//!
//! - no request is in it: from when it is let in to the last byte of its answer, be it silent meanwhile;
//! - no command runs in it that `exec` has begun and whose caller listens;
//! - since the last of these ended, or since it was made or resumed, `idle` has passed;
//! - no hold is on it.
//!
//! Upgraded connections, such as a WebSocket's, are refused and so never hold it.
//!
//! [`Idle`] says so of a sandbox, and what keeps it awake.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Holds, Name, Timestamp};

/// What goes on in a running sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Activity {
    /// Requests in it.
    pub requests: usize,
    /// Foreground commands in it.
    pub commands: usize,
    /// When the last of these ended, or it was made or resumed.
    pub active_at: Timestamp,
    /// Who holds it.
    pub holds: Holds,
}

/// What keeps a sandbox awake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum HeldBy {
    /// So many requests.
    Requests(usize),
    /// So many foreground commands.
    Commands(usize),
    /// A hold.
    Hold {
        /// Its name.
        name: Name,
        /// Until when. None: until it is released.
        until: Option<Timestamp>,
    },
}

/// Whether a running sandbox is idle, as an answer shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Idle {
    /// Since when nothing goes on in it. None: something does.
    pub idle_since: Option<Timestamp>,
    /// When it will be paused if nothing changes. None: not before something changes.
    pub will_pause_at: Option<Timestamp>,
    /// What keeps it awake now.
    pub held_by: Vec<HeldBy>,
}

/// Judges. `pause_after` is the sandbox's own; without one it is never paused for being idle.
#[must_use]
pub fn idle(activity: &Activity, pause_after: Option<Duration>, now: Timestamp) -> Idle {
    let mut held_by = Vec::new();
    if activity.requests > 0 {
        held_by.push(HeldBy::Requests(activity.requests));
    }
    if activity.commands > 0 {
        held_by.push(HeldBy::Commands(activity.commands));
    }
    let idle_since = held_by.is_empty().then_some(activity.active_at);
    let mut will_pause_at = idle_since.zip(pause_after).map(|(since, after)| since.plus(after));
    for hold in activity.holds.active(now) {
        held_by.push(HeldBy::Hold { name: hold.name.clone(), until: hold.until });
        will_pause_at = will_pause_at.zip(hold.until).map(|(pause, until)| pause.max(until));
    }
    Idle { idle_since, will_pause_at, held_by }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Hold;

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_ms(ms)
    }

    fn judge(activity: &Activity) -> (Option<u64>, Option<u64>, usize) {
        let idle = idle(activity, Some(Duration::from_millis(100)), at(50));
        (idle.idle_since.map(Timestamp::as_ms), idle.will_pause_at.map(Timestamp::as_ms), idle.held_by.len())
    }

    #[test]
    fn the_definition_is_published_as_it_stands_here() {
        let published = include_str!("../../docs/api.md");
        let parts = include_str!("idle.rs")
            .lines()
            .filter_map(|line| line.strip_prefix("//! - ").or(line.strip_prefix("//! Upg")));
        let parts: Vec<_> = parts.collect();
        assert_eq!(parts.len(), 5, "{parts:?}");
        for part in parts {
            assert!(published.contains(part), "docs/api.md does not say {part:?}");
        }
    }

    #[test]
    fn each_part_of_the_definition_keeps_it_awake() {
        let quiet = Activity { active_at: at(10), ..Activity::default() };
        assert_eq!(judge(&quiet), (Some(10), Some(110), 0));
        assert_eq!(judge(&Activity { requests: 1, ..quiet.clone() }), (None, None, 1));
        assert_eq!(judge(&Activity { commands: 2, ..quiet.clone() }), (None, None, 1));
        let held = |until| {
            let mut activity = quiet.clone();
            activity.holds.set(Hold { name: "ci".parse().unwrap(), until }).unwrap();
            activity
        };
        assert_eq!(judge(&held(None)), (Some(10), None, 1));
        assert_eq!(judge(&held(Some(at(500)))), (Some(10), Some(500), 1));
        assert_eq!(judge(&held(Some(at(60)))), (Some(10), Some(110), 1));
        assert_eq!(judge(&held(Some(at(50)))), (Some(10), Some(110), 0), "a hold that is over");
        assert_eq!(idle(&quiet, None, at(50)).will_pause_at, None, "never for that");
    }
}
