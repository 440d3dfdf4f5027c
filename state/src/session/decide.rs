//! What is next, when nothing is outstanding.

use super::{Action, Drain, Pending, Refusal, Session, Work};
use crate::{Event, State, Timestamp};

impl Session {
    /// Decides. Called behind every input.
    pub(super) fn advance(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        self.answer_the_hopeless(actions);
        if self.state == State::Running && self.kills_at_deadline() && self.is_over(now) {
            self.wants.kill = true;
        }
        if self.wants.kill {
            let inside = std::mem::take(&mut self.inside);
            let why = if self.moved { Refusal::Moved } else { Refusal::Killed };
            actions.extend(inside.into_iter().map(|request| Action::Cut(request, why)));
            self.refuse_all(why, actions);
        }
        match self.pending {
            Some(Pending::Again(action, at)) if at <= now => {
                self.pending = None;
                match action {
                    // A kill overtakes whatever was to be written before it.
                    Action::Write(_) if self.wants.kill && self.state != State::Killing => {}
                    Action::Write(event) => self.write(event, actions),
                    Action::Do(work) => self.work(work, actions),
                    _ => {}
                }
            }
            Some(Pending::Work(Work::Save)) if self.wants.kill || self.is_wanted() => actions.push(Action::Hurry),
            _ => {}
        }
        if self.pending.is_none() {
            self.decide(now, actions);
        }
    }

    fn decide(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        match self.state {
            State::Gone => {}
            _ if self.moved => self.work(Work::Destroy, actions),
            State::Killing => self.work(Work::Destroy, actions),
            _ if self.wants.kill => self.write(Event::Kill, actions),
            _ if self.release => self.work(Work::Release, actions),
            State::Failed => {}
            _ if self.ended => self.write(Event::Broke, actions),
            State::Creating => self.work(Work::Create, actions),
            State::Running => self.running(now, actions),
            State::Pausing => match (self.stopped, self.is_wanted_back()) {
                (false, false) => self.work(Work::Stop, actions),
                (false, true) => self.write(Event::StillRunning, actions),
                (true, false) => self.write(Event::Paused, actions),
                (true, true) => self.work(Work::Go, actions),
            },
            State::Suspended | State::Hibernated => self.paused(now, actions),
            State::Hibernating if self.is_wanted() => self.write(Event::StillSuspended, actions),
            State::Hibernating => self.work(Work::Save, actions),
            State::Resuming if self.from_disk => self.work(Work::Restore, actions),
            State::Resuming => self.work(Work::Go, actions),
        }
    }

    fn running(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        if self.drain.is_none() && !self.overdue && self.is_over(now) {
            let over = self.deadline.unwrap_or(now);
            self.drain = Some(Drain { cut_at: over.plus(self.limits.grace), cut: false, by_deadline: true });
        }
        let Some(drain) = &mut self.drain else {
            self.admit(actions);
            let overdue = self.overdue && self.inside.is_empty();
            let due = overdue || self.idle(now).will_pause_at.is_some_and(|at| at <= now);
            if due && self.not_before <= now {
                if overdue {
                    self.drain = Some(Drain { cut_at: now, cut: false, by_deadline: true });
                }
                self.write(Event::PauseBegun, actions);
            }
            return;
        };
        if self.inside.is_empty() {
            if self.not_before <= now {
                self.write(Event::PauseBegun, actions);
            }
        } else if drain.cut_at <= now && !drain.cut {
            drain.cut = true;
            actions.extend(self.inside.iter().map(|request| Action::Cut(*request, Refusal::Paused)));
        }
    }

    fn paused(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        if self.is_wanted() {
            self.write(Event::ResumeBegun, actions);
            return;
        }
        self.refuse_all(Refusal::Paused, actions);
        let due = self.wants.hibernate || self.hibernate_at().is_some_and(|at| at <= now);
        if self.state == State::Suspended && due && self.not_before <= now {
            self.write(Event::HibernateBegun, actions);
        }
    }

    /// Those for whom nothing can come any more.
    fn answer_the_hopeless(&mut self, actions: &mut Vec<Action>) {
        match self.state {
            State::Gone if self.moved => self.refuse_all(Refusal::Moved, actions),
            State::Killing | State::Gone => self.refuse_all(Refusal::Killed, actions),
            State::Failed => self.refuse_all(Refusal::Failed, actions),
            _ => {}
        }
    }

    pub(super) fn is_over(&self, now: Timestamp) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Somebody would have it run who may resume it.
    pub(super) fn is_wanted(&self) -> bool {
        self.wants.run || (self.limits.lifetime.auto_resume && !self.waiting.is_empty())
    }

    /// A pause may be called off: a request that comes while an idle sandbox is being paused finds it as if it had come before. One
    /// that is paused by hand, or since its time is over, is paused first.
    fn is_wanted_back(&self) -> bool {
        self.wants.run || (self.drain.is_none() && !self.waiting.is_empty())
    }

    pub(super) fn admit(&mut self, actions: &mut Vec<Action>) {
        for request in std::mem::take(&mut self.waiting) {
            self.inside.insert(request);
            actions.push(Action::Admit(request));
        }
    }

    pub(super) fn refuse_all(&mut self, why: Refusal, actions: &mut Vec<Action>) {
        actions.extend(self.waiting.drain(..).map(|request| Action::Refuse(request, why)));
    }

    pub(super) fn write(&mut self, event: Event, actions: &mut Vec<Action>) {
        self.pending = Some(Pending::Write(event));
        actions.push(Action::Write(event));
    }

    fn work(&mut self, work: Work, actions: &mut Vec<Action>) {
        self.pending = Some(Pending::Work(work));
        actions.push(Action::Do(work));
    }
}
