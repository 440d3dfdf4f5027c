//! What the owner of a sandbox decides: pure, so that every order of events can be tried.
//!
//! One lock or task owns a session. Whoever has an [`Input`] takes it there, and then does the [`Action`]s, outside the lock, whose
//! outcomes are inputs again. All requests to a sandbox pass here, so nothing can be in a VM that its session does not know of.
//!
//! ```text
//!                     idle, or paused by hand, or its time is over, and no request is in it
//!  running ─────────▶ write pause-begun ─▶ stop ─▶ write paused ─▶ suspended
//!     ▲                  │ a request came      │ a request came       │ a request came: once for all that wait
//!     ├── still-running ─┘                     │                      │
//!     ├── still-running ◀── go ────────────────┘                      │
//!     └── all who wait are let in ◀─ write resumed ◀─ go, restore ◀─ write resume-begun
//! ```
//!
//! Requests are let in only while the record says *running*. They wait during every transition, and whatever ends it answers them.
//! An intention is written before it is done and an observation after, so after a crash the record says what may have been done.

mod adopt;
mod decide;
mod outcome;
#[cfg(test)]
mod tests;
mod wire;

use std::collections::{BTreeSet, VecDeque};

pub use self::wire::{Action, Input, Limits, Refusal, RequestId, Work};
use crate::{Event, Idle, OnTimeout, State, Timestamp, idle::Activity, idle::idle};

/// See the module.
#[derive(Debug, Clone)]
pub struct Session {
    limits: Limits,
    /// As the record has it.
    state: State,
    entered_at: Timestamp,
    deadline: Option<Timestamp>,
    pending: Option<Pending>,
    inside: BTreeSet<RequestId>,
    /// Which of those who came are commands.
    commands: BTreeSet<RequestId>,
    waiting: VecDeque<RequestId>,
    activity: Activity,
    /// It is to be paused whatever holds it.
    drain: Option<Drain>,
    /// Its time is over, but the pause that follows could not be written: it serves on, and is paused when no request is in it.
    overdue: bool,
    /// While pausing: the vCPUs stand still.
    stopped: bool,
    /// While resuming: from disk.
    from_disk: bool,
    /// What is left of the VM's process is to be freed.
    release: bool,
    wants: Wants,
    /// The VM's process has ended by itself.
    ended: bool,
    /// Another node owns the record: nothing more is written.
    moved: bool,
    /// Something that need not be has failed: not before then again.
    not_before: Timestamp,
}

/// What somebody asked for.
#[derive(Debug, Clone, Copy, Default)]
struct Wants {
    run: bool,
    hibernate: bool,
    kill: bool,
}

/// What the session waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pending {
    Write(Event),
    Work(Work),
    /// It failed, and must be done: again then.
    Again(Action, Timestamp),
}

/// No new request is let in, and those inside may go on for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Drain {
    cut_at: Timestamp,
    cut: bool,
    /// Its time was over; nobody has asked for the pause.
    by_deadline: bool,
}

/// A session as an answer shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The record's state.
    pub state: State,
    /// Whether it is idle; none if it does not run.
    pub idle: Option<Idle>,
    /// Requests in it, commands not counted.
    pub requests: usize,
    /// Commands in it.
    pub commands: usize,
    /// Requests that wait for it.
    pub waiting: usize,
    /// When its time is over.
    pub deadline: Option<Timestamp>,
}

impl Session {
    /// The session of a sandbox whose record was just written, and what is to be done first.
    #[must_use]
    pub fn create(limits: Limits, now: Timestamp) -> (Self, Vec<Action>) {
        Self::at(State::Creating, limits, now).begin(now)
    }

    fn begin(mut self, now: Timestamp) -> (Self, Vec<Action>) {
        let mut actions = Vec::new();
        self.advance(now, &mut actions);
        (self, actions)
    }

    /// In a state, with nothing going on.
    fn at(state: State, limits: Limits, now: Timestamp) -> Self {
        Self {
            limits,
            state,
            entered_at: now,
            deadline: None,
            pending: None,
            inside: BTreeSet::new(),
            commands: BTreeSet::new(),
            waiting: VecDeque::new(),
            activity: Activity { active_at: now, ..Activity::default() },
            drain: None,
            overdue: false,
            stopped: false,
            from_disk: false,
            release: false,
            wants: Wants::default(),
            ended: false,
            moved: false,
            not_before: now,
        }
    }

    /// Takes an input; the actions are to be done in their order.
    pub fn take(&mut self, input: Input, now: Timestamp) -> Vec<Action> {
        let mut actions = Vec::new();
        match input {
            Input::Came(request) => self.waiting.push_back(request),
            Input::Over(request) => {
                if self.inside.remove(&request) {
                    self.activity.active_at = now;
                }
                self.waiting.retain(|waiting| *waiting != request);
                self.commands.remove(&request);
            }
            Input::Command(request) => {
                self.commands.insert(request);
                self.waiting.push_back(request);
            }
            // More holds than there may be are refused where the record is changed.
            Input::Hold(hold) => drop(self.activity.holds.set(hold)),
            Input::Release(name) => drop(self.activity.holds.release(&name)),
            Input::Deadline(deadline) => {
                self.deadline = deadline;
                self.overdue &= self.is_over(now);
                // More time, while those inside were given their grace: it goes on. Once the pause is begun, it is resumed with that time.
                let may_go_on = self.state == State::Running && self.pending.is_none() && !self.is_over(now);
                if may_go_on && self.drain.is_some_and(|drain| drain.by_deadline) {
                    self.drain = None;
                }
            }
            Input::Pause { grace } => {
                if matches!(self.state, State::Running | State::Pausing) {
                    let drain =
                        self.drain.get_or_insert(Drain { cut_at: now.plus(grace), cut: false, by_deadline: false });
                    drain.by_deadline = false;
                }
                self.wants.run = false;
            }
            Input::Resume => {
                self.wants.run = true;
                self.drain = None;
            }
            // One that runs, and is not being paused, is not sent to disk by its next pause.
            Input::Hibernate => self.wants.hibernate = self.state != State::Running || self.drain.is_some(),
            Input::Kill => self.wants.kill = true,
            Input::Timer => {}
            Input::Written { deadline } => {
                self.deadline = deadline;
                self.written(now, &mut actions);
            }
            Input::NotWritten => self.not_written(now, &mut actions),
            Input::Superseded(state) => self.superseded(state, now),
            Input::Did => self.did(&mut actions),
            Input::DidNot => self.did_not(now, &mut actions),
            Input::Ended => self.ended |= self.has_process(),
        }
        self.advance(now, &mut actions);
        actions
    }

    /// When to give [`Input::Timer`] next. None: not before another input.
    #[must_use]
    pub fn wake_at(&self, now: Timestamp) -> Option<Timestamp> {
        if let Some(pending) = self.pending {
            return if let Pending::Again(_, at) = pending { Some(at) } else { None };
        }
        match self.state {
            State::Running => match self.drain {
                Some(_) if self.inside.is_empty() => Some(self.not_before),
                Some(drain) => (!drain.cut).then_some(drain.cut_at),
                None => {
                    let pause = self.idle(now).will_pause_at.map(|at| at.max(self.not_before));
                    let over = match (self.overdue, self.inside.is_empty()) {
                        (false, _) => self.deadline,
                        (true, true) => Some(self.not_before),
                        (true, false) => None,
                    };
                    over.into_iter().chain(pause).min()
                }
            },
            State::Suspended if self.wants.hibernate => Some(self.not_before),
            State::Suspended => self.hibernate_at(),
            _ => None,
        }
    }

    /// How it stands.
    #[must_use]
    pub fn status(&self, now: Timestamp) -> Status {
        let (requests, commands) = self.inside();
        Status {
            state: self.state,
            idle: (self.state == State::Running).then(|| self.idle(now)),
            requests,
            commands,
            waiting: self.waiting.len(),
            deadline: self.deadline,
        }
    }

    fn idle(&self, now: Timestamp) -> Idle {
        let (requests, commands) = self.inside();
        let activity = Activity { requests, commands, ..self.activity.clone() };
        idle(&activity, self.limits.lifetime.pause_after, now)
    }

    /// Requests and commands in it.
    fn inside(&self) -> (usize, usize) {
        let commands = self.inside.intersection(&self.commands).count();
        (self.inside.len() - commands, commands)
    }

    fn hibernate_at(&self) -> Option<Timestamp> {
        self.limits.lifetime.hibernate_after.map(|after| self.entered_at.plus(after).max(self.not_before))
    }

    /// Whether a VM's process should be there, and its end is news.
    const fn has_process(&self) -> bool {
        !self.release && !matches!(self.state, State::Hibernated | State::Killing | State::Gone | State::Failed)
    }

    fn kills_at_deadline(&self) -> bool {
        self.limits.lifetime.on_timeout == OnTimeout::Kill
    }
}
