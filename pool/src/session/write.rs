//! What a sandbox's task writes into its record.

use std::time::{Duration, Instant};

use stasis_pool_api::{Hold, Name, SandboxError, SandboxInfo, SandboxState as State, Timestamp};
use stasis_state::{Change, Deadline, Event, Facts, Input, NodeId, Owner, Record, Saved, StoreError};

use super::{driver::Driver, info::recorded, message::Goal, service::metrics};
use crate::{build::chain, template::part};

/// The only node there is: records are its own.
const NODE: &str = "local";

impl Driver {
    /// Writes an event, and says what came of it.
    pub(super) async fn write(&mut self, event: Event) -> Input {
        loop {
            let Ok(mut change) = self.record.on(event, Timestamp::now()) else {
                // The table has no such transition: the record is not what this task has made of it.
                return Input::Superseded(self.record.state());
            };
            self.note(event, change.facts());
            let from = self.record.state();
            match self.commit(change).await {
                Ok(()) => {
                    self.wrote(event, from).await;
                    return Input::written(&self.record);
                }
                Err(StoreError::Conflict { present, .. }) if present.state == from => {}
                Err(StoreError::Conflict { present, .. }) => return Input::Superseded(present.state),
                Err(StoreError::NotFound { .. }) => return Input::Superseded(State::Gone),
                Err(error) => {
                    tracing::error!(sandbox = %self.record.id(), %error, %event, "a sandbox's record cannot be written");
                    if matches!(event, Event::PauseBegun | Event::HibernateBegun) {
                        let reason = error.to_string();
                        let not_paused = |goal| matches!(goal, Goal::Paused | Goal::Saved);
                        self.settle(not_paused, |_| Err(SandboxError::Store { reason: reason.clone() }));
                    }
                    return Input::NotWritten;
                }
            }
        }
    }

    fn measure(&mut self, event: Event, from: State) {
        metrics::transition(event);
        self.counted.moves_to(self.record.state());
        match event {
            Event::ResumeBegun | Event::PauseBegun | Event::HibernateBegun => {
                self.begun = Some((Instant::now(), from == State::Hibernated));
            }
            _ => {
                if let Some((begun, from_disk)) = self.begun.take() {
                    metrics::completed(event, from_disk, begun.elapsed());
                }
            }
        }
    }

    /// What a transition leaves behind beside the state.
    fn note(&self, event: Event, facts: &mut Facts) {
        match event {
            Event::Started | Event::Resumed => {
                let process = self.machine.as_ref().and_then(|machine| machine.process());
                facts.owner = NODE.parse::<NodeId>().ok().map(|node| Owner { node, process, lease_until: None });
            }
            Event::PauseBegun => {
                facts.idle_since = self.core.status(Timestamp::now()).idle.and_then(|idle| idle.idle_since);
            }
            Event::Hibernated => {
                let name = |part: &str| part.parse::<Name>().ok();
                facts.saved = name(part::MEMORY)
                    .zip(name(part::STATE))
                    .zip(name(part::DISK))
                    .map(|((memory, machine), disk)| Saved { memory, machine, disk });
            }
            Event::Broke => {
                let why = self.trouble.as_ref().map(|trouble| chain(trouble));
                let was = self.record.state();
                let lost = match (self.ended, &self.machine) {
                    (false, None) => {
                        format!("the node was stopped or killed while it was {was}, and its memory is gone")
                    }
                    _ => "its VM has ended by itself".to_owned(),
                };
                facts.failure = Some(why.unwrap_or(lost));
            }
            _ => {}
        }
    }

    /// What follows from a transition at once.
    async fn wrote(&mut self, event: Event, from: State) {
        let id = self.record.id().clone();
        tracing::info!(sandbox = %id, %event, %from, to = %self.record.state(), "sandbox");
        self.measure(event, from);
        match event {
            // What it was brought back from is old now.
            Event::Resumed => {
                if let Err(error) = self.around.machines.forget(&id).await {
                    tracing::warn!(sandbox = %id, %error, "what was saved of a sandbox could not be removed");
                }
                self.trouble = None;
            }
            // Whoever waited for the pause has it, however short it was.
            Event::ResumeBegun => {
                let on_disk = from == State::Hibernated;
                self.settle(|goal| goal == Goal::Paused || (goal == Goal::Saved && on_disk), |this| Ok(this.info()));
                self.not_saved();
            }
            Event::StillSuspended => self.not_saved(),
            // Whatever went wrong before, this is another attempt.
            Event::HibernateBegun => self.trouble = None,
            _ => {}
        }
    }

    /// Answers those who wait for one of these goals.
    fn settle(&mut self, which: impl Fn(Goal) -> bool, answer: impl Fn(&Self) -> Result<SandboxInfo, SandboxError>) {
        let (settled, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.watchers).into_iter().partition(|watcher| which(watcher.goal));
        self.watchers = rest;
        for watcher in settled {
            // Whoever asked may have left.
            let _ = watcher.reply.send(answer(self));
        }
    }

    fn not_saved(&mut self) {
        self.settle(
            |goal| goal == Goal::Saved,
            |this| {
                Err(match &this.trouble {
                    Some(_) => this.not_done("be hibernated", &""),
                    None => this.wrong("be hibernated, since somebody has it resumed"),
                })
            },
        );
    }

    pub(super) async fn set_timeout(&mut self, timeout: Duration) -> Result<(), SandboxError> {
        self.refuse_if_over("get another timeout")?;
        self.edit(|facts, now| {
            facts.lifetime.timeout = Some(timeout);
            // The clock goes on as it does: it runs while the sandbox does.
            facts.deadline = Some(match facts.deadline {
                Some(Deadline::At(_)) => Deadline::At(now.plus(timeout)),
                _ => Deadline::Left(timeout),
            });
            Ok(())
        })
        .await?;
        self.give(Input::Deadline(self.record.ends_at())).await;
        Ok(())
    }

    pub(super) async fn hold(&mut self, hold: Hold) -> Result<(), SandboxError> {
        self.refuse_if_over("be held")?;
        let set = hold.clone();
        self.edit(move |facts, _| facts.holds.set(set.clone()).map_err(|error| error.to_string())).await?;
        self.give(Input::Hold(hold)).await;
        Ok(())
    }

    pub(super) async fn release(&mut self, name: Name) -> Result<(), SandboxError> {
        self.refuse_if_over("be released")?;
        let of = name.clone();
        self.edit(move |facts, _| {
            facts.holds.release(&of);
            Ok(())
        })
        .await?;
        self.give(Input::Release(name)).await;
        Ok(())
    }

    fn refuse_if_over(&self, wanted: &'static str) -> Result<(), SandboxError> {
        match self.record.state() {
            State::Failed | State::Killing | State::Gone => Err(self.wrong(wanted)),
            _ => Ok(()),
        }
    }

    async fn edit(&mut self, alter: impl Fn(&mut Facts, Timestamp) -> Result<(), String>) -> Result<(), SandboxError> {
        loop {
            let now = Timestamp::now();
            let mut change = self.record.edit(now);
            alter(change.facts(), now).map_err(|reason| SandboxError::Invalid { reason })?;
            let state = self.record.state();
            match self.commit(change).await {
                Ok(()) => return Ok(()),
                Err(StoreError::Conflict { present, .. }) if present.state == state => {}
                Err(error) => return Err(SandboxError::Store { reason: error.to_string() }),
            }
        }
    }

    /// Makes a change. Where another was faster, that is read first, so that the next attempt builds on it.
    async fn commit(&mut self, change: Change) -> Result<(), StoreError> {
        match self.around.store.commit(change).await {
            Ok(record) => {
                self.view.send_replace(recorded(&record));
                self.record = record;
                Ok(())
            }
            Err(error @ StoreError::Conflict { .. }) => {
                let read: Record = self.around.store.get(self.record.id()).await?;
                if read.state() == self.record.state() {
                    self.record = read;
                }
                Err(error)
            }
            Err(error) => Err(error),
        }
    }
}
