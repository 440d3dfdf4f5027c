//! The task of one sandbox: gives its [`Session`] what happens, and does what that decides.
//!
//! ```text
//!  messages, the timer, the work's outcome, the VM's end ──▶ Session::take ──▶ write, work, let in, refuse, cut ──▶ …
//! ```
//! Writes are awaited here, so they never overtake each other; work (stopping, saving, restoring) is polled beside the messages.

use std::{
    collections::{HashMap, VecDeque},
    future::pending,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::BoxFuture;
use stasis_pool_api::{
    PauseTo, SandboxError, SandboxInfo, SandboxLogs, SandboxState as State, TemplateName, Timestamp,
};
use stasis_state::{Action, Input, Record, Refusal, RequestId, Session, Store};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};

use super::{
    adoption::Adoption,
    departure::Departure,
    machine::{Machine, MachineError, Machines},
    message::{Goal, Message, Origin, Reply, Source, Watcher},
    service::metrics::Counted,
    visit::{Cut, Presence, Visitor, enter},
    work::{Done, outcome},
};

/// How long requests may go on in a sandbox that is paused by hand: as long as the gateway lets them finish when it stops.
pub(super) const GRACE: Duration = Duration::from_secs(10);

/// What a task shares with the others.
#[derive(Clone)]
pub(super) struct Around {
    pub(super) machines: Arc<dyn Machines>,
    pub(super) store: Arc<dyn Store>,
}

pub(super) struct Driver {
    pub(super) around: Around,
    pub(super) core: Session,
    pub(super) record: Record,
    pub(super) template: TemplateName,
    pub(super) source: Source,
    pub(super) machine: Option<Arc<Machine>>,
    pub(super) inbox: mpsc::UnboundedReceiver<Message>,
    pub(super) task: mpsc::UnboundedSender<Message>,
    /// See [`Handle`](super::service::Handle).
    pub(super) spare_since: watch::Sender<Option<Timestamp>>,
    /// As its record was last written.
    pub(super) view: watch::Sender<SandboxInfo>,
    pub(super) work: Option<BoxFuture<'static, Done>>,
    pub(super) visitors: HashMap<RequestId, Visitor>,
    pub(super) watchers: Vec<Watcher>,
    pub(super) connecting: JoinSet<()>,
    /// Why what was last tried failed.
    pub(super) trouble: Option<MachineError>,
    pub(super) ended: bool,
    /// Its memory could not be saved since it ran last.
    pub(super) unsaved: bool,
    /// It is to be on disk, and then nothing of it is needed here.
    pub(super) saving: bool,
    /// It was being made, resumed or stopped when it was to be saved, and is told again after that.
    pub(super) save_due: bool,
    pub(super) leaving: Departure,
    /// Counts it in its state.
    pub(super) counted: Counted,
    /// When the transition that is under way began, and whether from disk.
    pub(super) begun: Option<(Instant, bool)>,
}

/// What it begins with.
pub(super) enum First {
    /// It is new.
    Actions(Vec<Action>),
    /// Another node has left it.
    Adoption(Adoption),
}

impl Driver {
    pub(super) async fn live(mut self, first: First) {
        match first {
            First::Actions(actions) => self.perform(actions.into()).await,
            First::Adoption(adoption) => {
                if !self.take_over(adoption).await {
                    return;
                }
            }
        }
        while !self.is_over() && !self.leaves() {
            self.save_what_is_due().await;
            let now = Timestamp::now();
            let wake = self.core.wake_at(now).map(|at| tokio::time::Instant::now() + at.since(now));
            let input = tokio::select! {
                message = self.inbox.recv() => {
                    let Some(message) = message else { break };
                    self.hear(message).await;
                    continue;
                }
                done = outcome(&mut self.work) => self.finished(done),
                () = at(wake) => Input::Timer,
                reason = end_of(self.machine.as_ref()), if !self.ended => {
                    self.ended = true;
                    tracing::warn!(sandbox = %self.record.id(), reason, "the VM of a sandbox has ended");
                    Input::Ended
                }
                Some(_) = self.connecting.join_next() => continue,
            };
            self.give(input).await;
        }
        self.leave();
    }

    /// Nothing is left to be done, now or later.
    fn is_over(&self) -> bool {
        let state = self.core.status(Timestamp::now()).state;
        let quiet = self.work.is_none() && self.machine.is_none();
        quiet && (state == State::Gone || (self.saving && matches!(state, State::Hibernated | State::Failed)))
    }

    pub(super) async fn give(&mut self, input: Input) {
        let actions = self.core.take(input, Timestamp::now());
        self.perform(actions.into()).await;
    }

    pub(super) async fn perform(&mut self, mut actions: VecDeque<Action>) {
        while let Some(action) = actions.pop_front() {
            let input = match action {
                Action::Admit(request) => self.admit(request),
                Action::Refuse(request, why) => {
                    self.refuse(request, why);
                    None
                }
                Action::Cut(request, why) => {
                    self.visitors.get(&request).inspect(|visitor| visitor.cut(why));
                    None
                }
                Action::Write(event) => Some(self.write(event).await),
                Action::Do(work) => {
                    self.work = Some(self.start(work));
                    None
                }
                // What is saved is a clone and what the guest has changed: ending that is no quicker than finishing it.
                Action::Hurry => None,
            };
            if let Some(input) = input {
                actions.extend(self.core.take(input, Timestamp::now()));
            }
        }
        self.tell();
    }

    pub(super) async fn hear(&mut self, message: Message) {
        let state = self.core.status(Timestamp::now()).state;
        match message {
            Message::Visit(request, opening, patience, reply) => {
                let input = if opening.is_command() { Input::Command } else { Input::Came };
                let (came, life) = (Instant::now(), self.life());
                let visitor = Visitor::Waiting { reply, opening, came, patience, life };
                self.visitors.insert(request, visitor);
                self.give(input(request)).await;
            }
            Message::Over(request) => {
                self.visitors.remove(&request);
                self.give(Input::Over(request)).await;
            }
            Message::Pause(to, reply) => {
                if state != State::Running && !(to == PauseTo::Disk && state == State::Suspended) {
                    drop(reply.send(Err(self.wrong("be paused"))));
                    return;
                }
                let goal = if to == PauseTo::Disk { Goal::Saved } else { Goal::Paused };
                self.watchers.push(Watcher { goal, reply });
                self.give(Input::Pause { grace: GRACE }).await;
                if to == PauseTo::Disk {
                    self.give(Input::Hibernate).await;
                }
            }
            Message::Resume(request, timeout, reply) => {
                self.call_off_pauses();
                if let Some(timeout) = timeout
                    && let Err(error) = self.set_timeout(timeout).await
                {
                    drop(reply.send(Err(error)));
                    return;
                }
                self.visitors.insert(request, Visitor::Resumer { reply, life: self.life() });
                self.give(Input::Resume).await;
                self.give(Input::Came(request)).await;
            }
            Message::Timeout(timeout, reply) => {
                let set = self.set_timeout(timeout).await;
                drop(reply.send(set.map(|()| self.info())));
            }
            Message::Hold(hold, reply) => {
                let held = self.hold(hold).await;
                drop(reply.send(held.map(|()| self.info())));
            }
            Message::Release(name, reply) => {
                let released = self.release(name).await;
                drop(reply.send(released.map(|()| self.info())));
            }
            Message::Kill(reply) => {
                self.watchers.push(Watcher { goal: Goal::Gone, reply });
                self.give(Input::Kill).await;
            }
            Message::Fork(children, patience, reply) => self.fork(children, patience, reply, state),
            Message::Inspect(reply) => drop(reply.send(self.info())),
            Message::Logs(reply) => self.logs(reply, state),
            Message::Spare => self.give(Input::Hibernate).await,
            Message::Save(reply) => {
                self.saving = true;
                self.save_due = !matches!(state, State::Running | State::Suspended);
                self.watchers.push(Watcher { goal: Goal::Saved, reply });
                self.save().await;
            }
            Message::Leave(asked) => self.leaving = Departure::Soon(asked),
            Message::LeaveNow => {
                if let Departure::Soon(asked) = std::mem::take(&mut self.leaving) {
                    self.leaving = Departure::Now(asked);
                }
            }
        }
    }

    async fn save(&mut self) {
        self.give(Input::Pause { grace: Duration::ZERO }).await;
        self.give(Input::Hibernate).await;
    }

    async fn save_what_is_due(&mut self) {
        let state = self.core.status(Timestamp::now()).state;
        if self.save_due && matches!(state, State::Running | State::Suspended) {
            self.save_due = false;
            self.save().await;
        }
    }

    /// Beside all else: the guest goes on, and whatever ends it ends this.
    fn fork(&mut self, children: u32, patience: Duration, reply: Reply<Origin>, state: State) {
        let Some(machine) = self.machine.clone().filter(|_| state == State::Running) else {
            return drop(reply.send(Err(self.wrong("be forked"))));
        };
        let (machines, record) = (Arc::clone(&self.around.machines), self.record.clone());
        let view = self.view.subscribe();
        self.connecting.spawn(async move {
            let origin = match machines.fork(&machine, children, patience).await {
                Ok(moment) => Ok(Origin { moment: Arc::new(moment), record }),
                Err(error) => {
                    let (id, wanted, state) = (record.id().clone(), "be forked", view.borrow().state);
                    // It was stopped meanwhile, and that is why.
                    Err(if state == State::Running {
                        error.told(id, wanted)
                    } else {
                        SandboxError::State { id, state, wanted }
                    })
                }
            };
            drop(reply.send(origin));
        });
    }

    /// Beside all else.
    fn logs(&mut self, reply: Reply<SandboxLogs>, state: State) {
        let machine = self.machine.clone();
        self.connecting.spawn(async move {
            let logs = match machine {
                Some(machine) => machine.logs(state == State::Running).await,
                None => SandboxLogs::default(),
            };
            drop(reply.send(Ok(logs)));
        });
    }

    fn admit(&mut self, request: RequestId) -> Option<Input> {
        match (self.visitors.remove(&request), &self.machine) {
            (Some(Visitor::Waiting { reply, opening, came, life, .. }), Some(machine)) => {
                let paused = life != self.life();
                let (sandbox, task) = (self.record.id().clone(), self.task.clone());
                let lease = Presence { sandbox, request, task, cut: Cut::default() };
                let inside = enter(machine, lease, reply, opening, (came, paused), &mut self.connecting);
                self.visitors.insert(request, inside);
                None
            }
            (Some(Visitor::Resumer { reply, life }), _) => {
                drop(reply.send(Ok((self.info(), life != self.life()))));
                Some(Input::Over(request))
            }
            _ => Some(Input::Over(request)),
        }
    }

    /// Which life its VM lives: another one after every resume.
    fn life(&self) -> Option<u64> {
        self.machine.as_ref().map(|machine| machine.certificate().generation)
    }

    fn refuse(&mut self, request: RequestId, why: Refusal) {
        let error = self.refusal(why);
        match self.visitors.remove(&request) {
            Some(Visitor::Waiting { reply, .. }) => drop(reply.send(Err(error))),
            Some(Visitor::Resumer { reply, .. }) => drop(reply.send(Err(error))),
            Some(Visitor::Inside(_)) | None => {}
        }
    }

    fn refusal(&self, why: Refusal) -> SandboxError {
        match why {
            Refusal::Paused | Refusal::Failed => self.wrong("take requests"),
            Refusal::Killed | Refusal::Moved => SandboxError::Unknown { id: self.record.id().to_string() },
            Refusal::NotResumed => self.not_done("be resumed", &why),
            Refusal::Store => SandboxError::Store { reason: "its record could not be written".into() },
        }
    }

    /// The node could not do that; if nothing else is known, for this reason.
    pub(super) fn not_done(&self, wanted: &'static str, why: &dyn std::fmt::Display) -> SandboxError {
        let id = self.record.id().clone();
        match &self.trouble {
            Some(trouble) => trouble.told(id, wanted),
            None => SandboxError::NotDone { id, wanted, reason: why.to_string() },
        }
    }

    /// It is in a state in which that is impossible.
    pub(super) fn wrong(&self, wanted: &'static str) -> SandboxError {
        let state = self.core.status(Timestamp::now()).state;
        SandboxError::State { id: self.record.id().clone(), state, wanted }
    }

    fn call_off_pauses(&mut self) {
        let (off, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.watchers).into_iter().partition(|watcher| watcher.goal == Goal::Paused);
        self.watchers = rest;
        for watcher in off {
            drop(watcher.reply.send(Err(self.wrong("be paused, since somebody has it resumed"))));
        }
    }

    /// Answers those whose goal is reached, or out of reach.
    fn tell(&mut self) {
        let state = self.core.status(Timestamp::now()).state;
        self.unsaved &= state != State::Running;
        let is_spare = state == State::Suspended && !self.unsaved;
        self.spare_since.send_replace(is_spare.then(|| self.record.entered_at()));
        if let Some(machine) = &self.machine {
            let promise = machine.vmm.promise();
            // Who lacks what it has may wait for that. Behind that: whoever asks for it finds it there.
            if is_spare || state == State::Hibernating { promise.is_leaving() } else { promise.stays() }
        }
        for watcher in std::mem::take(&mut self.watchers) {
            let reached = match watcher.goal {
                // Its maker has it, however short its life may be. Nobody owned it before.
                Goal::Started => self.record.facts().owner.is_some(),
                Goal::Paused => matches!(state, State::Suspended | State::Hibernating | State::Hibernated),
                // With its process gone, and the memory given back.
                Goal::Saved => state == State::Hibernated && self.machine.is_none() && self.work.is_none(),
                Goal::Gone => state == State::Gone,
            };
            let lost = match state {
                State::Failed | State::Killing | State::Gone => watcher.goal != Goal::Gone,
                _ => false,
            };
            if reached {
                drop(watcher.reply.send(Ok(self.info())));
            } else if lost {
                let error = match (self.trouble.take(), watcher.goal) {
                    (Some(MachineError::Claim(error)), Goal::Started) => SandboxError::Claim(error),
                    (trouble @ Some(_), Goal::Started) => {
                        self.trouble = trouble;
                        self.not_done("start", &"")
                    }
                    (_, goal) => self.wrong(goal.in_words()),
                };
                drop(watcher.reply.send(Err(error)));
            } else {
                self.watchers.push(watcher);
            }
        }
    }
}

async fn at(then: Option<tokio::time::Instant>) {
    match then {
        Some(then) => tokio::time::sleep_until(then).await,
        None => pending().await,
    }
}

async fn end_of(machine: Option<&Arc<Machine>>) -> String {
    match machine {
        Some(machine) => {
            machine.vmm.ended().await.guest.map_or_else(|| "its process is gone".into(), |ended| ended.why.to_string())
        }
        None => pending().await,
    }
}
