//! What follows from an action's outcome.

use super::{Action, Pending, Refusal, Session, Work};
use crate::{Event, State, Timestamp, transition};

impl Session {
    /// The store has taken the write that was outstanding: the state is now what the table says.
    pub(super) fn written(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(event) = self.take_write() else { return };
        let Ok(state) = transition::next(self.state, event) else { return };
        let before = std::mem::replace(&mut self.state, state);
        if before != state {
            self.entered_at = now;
        }
        match event {
            Event::Started | Event::Resumed | Event::StillRunning => {
                self.stopped = false;
                self.wants.run = false;
                self.wants.hibernate = false;
                self.activity.active_at = now;
                // Before the deadline is looked at again: whoever waited for this resume is let in by it.
                if self.drain.is_none() && !self.wants.kill && !self.ended {
                    self.admit(actions);
                }
            }
            Event::Paused => {
                self.drain = None;
                self.overdue = false;
                self.stopped = false;
            }
            Event::ResumeBegun => self.from_disk = before == State::Hibernated,
            Event::Hibernated => {
                self.release = true;
                self.wants.hibernate = false;
            }
            Event::Broke => {
                self.release = true;
                self.ended = false;
                self.refuse_all(Refusal::Failed, actions);
            }
            Event::Kill | Event::Removed => self.refuse_all(Refusal::Killed, actions),
            _ => {}
        }
    }

    /// The store could not be written. What runs goes on; who waits for the write hears why it does not come.
    pub(super) fn not_written(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(event) = self.take_write() else { return };
        if event == Event::PauseBegun {
            // Called off, whoever wanted it: requests are let in as before.
            self.wants.hibernate = false;
            self.drain = None;
            self.overdue = self.is_over(now);
            self.not_before = now.plus(self.limits.retry);
            return;
        }
        self.refuse_all(Refusal::Store, actions);
        match event {
            // Nothing was done yet, and nothing has to be.
            Event::HibernateBegun => self.not_before = now.plus(self.limits.retry),
            Event::ResumeBegun => self.wants.run = false,
            // Already done, or asked for: the record has to follow.
            _ => self.pending = Some(Pending::Again(Action::Write(event), now.plus(self.limits.retry))),
        }
    }

    /// The write was refused, since the record is no longer what this session made of it.
    pub(super) fn superseded(&mut self, state: State, now: Timestamp) {
        if self.take_write().is_none() {
            return;
        }
        self.wants.kill = true;
        if state == State::Killing {
            self.state = state;
            self.entered_at = now;
        } else {
            // Gone, or another's: what is here is removed, and the record is left as it is.
            self.moved = true;
        }
    }

    /// The work that was outstanding is done.
    pub(super) fn did(&mut self, actions: &mut Vec<Action>) {
        let Some(work) = self.take_work() else { return };
        if work == Work::Destroy {
            self.end_or_write_removed(actions);
            return;
        }
        if work == Work::Release {
            self.release = false;
            return;
        }
        if self.wants.kill || self.ended {
            return;
        }
        match work {
            Work::Create => self.write(Event::Started, actions),
            Work::Stop => self.stopped = true,
            Work::Go if self.state == State::Pausing => {
                self.stopped = false;
                self.write(Event::StillRunning, actions);
            }
            Work::Go | Work::Restore => self.write(Event::Resumed, actions),
            Work::Save if self.is_wanted() => self.write(Event::StillSuspended, actions),
            Work::Save => self.write(Event::Hibernated, actions),
            Work::Release | Work::Destroy => {}
        }
    }

    /// It was not done.
    pub(super) fn did_not(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(work) = self.take_work() else { return };
        let again = now.plus(self.limits.retry);
        match work {
            // What cannot be freed now must be freed later; nothing else happens to this sandbox before.
            Work::Destroy | Work::Release => self.pending = Some(Pending::Again(Action::Do(work), again)),
            _ if self.wants.kill => {}
            Work::Restore => {
                self.ended = false;
                self.wants.run = false;
                self.refuse_all(Refusal::NotResumed, actions);
                self.write(Event::StillHibernated, actions);
            }
            _ if self.ended => {}
            Work::Save => {
                self.not_before = again;
                self.wants.hibernate = false;
                self.write(Event::StillSuspended, actions);
            }
            Work::Create | Work::Stop | Work::Go => self.ended = true,
        }
    }

    /// The outstanding write, whose outcome has come.
    fn take_write(&mut self) -> Option<Event> {
        let Some(Pending::Write(event)) = self.pending else { return None };
        self.pending = None;
        Some(event)
    }

    /// The outstanding work, whose outcome has come.
    fn take_work(&mut self) -> Option<Work> {
        let Some(Pending::Work(work)) = self.pending else { return None };
        self.pending = None;
        Some(work)
    }

    fn end_or_write_removed(&mut self, actions: &mut Vec<Action>) {
        if self.moved {
            self.state = State::Gone;
        } else {
            self.write(Event::Removed, actions);
        }
    }
}
