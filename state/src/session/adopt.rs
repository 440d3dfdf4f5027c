//! Taking over a sandbox after a crash of whoever owned it.
//!
//! | the record says | its VM's process lives | it does not |
//! |---|---|---|
//! | creating | it is removed: nobody was told of it | it is removed |
//! | running | it goes on; its idle time begins anew | failed |
//! | pausing | its vCPUs are let run, whether they stood still or not | failed |
//! | suspended | it stays so | failed: its memory is gone |
//! | hibernating | it is saved again | failed |
//! | hibernated | what is left of the process is freed | it stays so |
//! | resuming, from RAM | its vCPUs are let run | failed |
//! | resuming, from disk | it is restored again | it is restored again |
//! | killing | it is removed | it is removed |
//! | failed | what is left of the process is freed | it stays so |
//! | failed before it ever ran | it is removed: whoever wanted it was refused, or not told | it is removed |

use super::{Action, Limits, Session};
use crate::{Record, State, Timestamp};

impl Session {
    /// The session of a sandbox that somebody else owned before, and what is to be done first. `lives`: the process that the record
    /// names was found, with the same start time, and answers.
    #[must_use]
    pub fn adopt(record: &Record, lives: bool, limits: Limits, now: Timestamp) -> (Self, Vec<Action>) {
        let mut session = Self::at(record.state(), limits, now);
        session.entered_at = record.entered_at();
        session.deadline = record.ends_at();
        session.activity.holds = record.facts().holds.clone();
        let lost = !lives;
        match record.state() {
            State::Creating => session.wants.kill = true,
            // Its maker, who was refused, was about to remove it.
            State::Failed if record.facts().owner.is_none() => session.wants.kill = true,
            State::Running | State::Suspended | State::Hibernating => session.ended = lost,
            State::Pausing => {
                session.ended = lost;
                session.stopped = true;
                session.wants.run = true;
            }
            State::Resuming => {
                session.from_disk = record.facts().saved.is_some();
                session.ended = lost && !session.from_disk;
            }
            State::Hibernated | State::Failed => session.release = lives,
            State::Killing | State::Gone => {}
        }
        session.begin(now)
    }
}
