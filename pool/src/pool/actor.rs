//! The task that owns a pool.

use std::{collections::VecDeque, sync::Arc};

use stasis_pool_api::{NoCapacity, PoolStatus, StartKind};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};

use super::{Answer, Grant, Message, Shared, Ticket, backoff::Backoff};
use crate::{
    admission::Reservation,
    metrics,
    restore::{Paused, RestoreError, Slot},
    template::Template,
};

pub(super) fn start(template: Arc<Template>, shared: Arc<Shared>) -> mpsc::UnboundedSender<Message> {
    let (sender, inbox) = mpsc::unbounded_channel();
    let actor = Actor {
        releases: shared.admission.releases(),
        shortages: shared.admission.shortages(),
        template,
        shared,
        outbox: sender.clone(),
        ready: VecDeque::new(),
        waiters: VecDeque::new(),
        restoring: 0,
        rewinding: 0,
        claimed: 0,
        peak: Peak::default(),
        backoff: Backoff::default(),
        outgrown: false,
        last_failure: None,
        short_of: None,
    };
    tokio::spawn(actor.live(inbox));
    sender
}

struct Actor {
    template: Arc<Template>,
    shared: Arc<Shared>,
    outbox: mpsc::UnboundedSender<Message>,
    releases: watch::Receiver<()>,
    shortages: watch::Receiver<()>,
    ready: VecDeque<Paused>,
    waiters: VecDeque<oneshot::Sender<Answer>>,
    restoring: u32,
    rewinding: u32,
    claimed: u32,
    peak: Peak,
    backoff: Backoff,
    /// The template is of another kind of host, and the node knows.
    outgrown: bool,
    last_failure: Option<String>,
    short_of: Option<NoCapacity>,
}

impl Actor {
    async fn live(mut self, mut inbox: mpsc::UnboundedReceiver<Message>) {
        self.refill();
        loop {
            let message = tokio::select! {
                message = inbox.recv() => message,
                _ = self.shortages.changed() => {
                    self.spare();
                    continue;
                }
                _ = self.releases.changed(), if self.short_of.is_some() => {
                    self.refill();
                    continue;
                }
                () = after(self.backoff.until()) => {
                    self.backoff.over();
                    self.refill();
                    continue;
                }
            };
            match message {
                Some(Message::Drain) | None => break,
                Some(message) => self.handle(message),
            }
            self.waiters.retain(|waiter| !waiter.is_closed());
            self.refill();
            metrics::pool(&self.status());
        }
        // Ready VMs end with the actor; what is claimed or being restored ends by itself. The series of a pool that is gone say so.
        let name = self.template.info().spec.name.clone();
        metrics::pool(&PoolStatus::gone(name));
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Claim(reply) => match self.take_ready() {
                Some(vm) => self.grant(reply, vm, StartKind::Paused),
                None => self.waiters.push_back(reply),
            },
            Message::Restored(result) => {
                self.restoring -= 1;
                self.restored(*result);
            }
            Message::Used(slot) => self.used(*slot),
            Message::Rewound(result) => {
                self.rewinding -= 1;
                self.rewound(*result);
            }
            Message::Released => {
                self.peak.released();
                self.claimed -= 1;
                if self.supply() > self.most_supply() {
                    drop(self.ready.pop_front());
                }
            }
            Message::Proved => self.backoff.succeeded(),
            Message::Unproved(why) => self.failed(why),
            Message::Died(slot) => {
                let before = self.ready.len();
                self.ready.retain(|vm| vm.slot.id != slot);
                if self.ready.len() < before {
                    self.failed("the process of a paused VM ended".into());
                }
            }
            Message::Status(reply) => drop(reply.send(self.status())),
            Message::Drain => {}
        }
    }

    fn restored(&mut self, result: Result<Paused, RestoreError>) {
        let name = &self.template.info().spec.name;
        match result {
            Ok(vm) => {
                metrics::restored(name, Ok(vm.took));
                self.watch(&vm.slot);
                self.became_ready(vm, StartKind::Cold);
            }
            Err(error) => {
                let mut why = error.to_string();
                if error.is_incompatible() {
                    why.push_str(": it is being built again here");
                    if !std::mem::replace(&mut self.outgrown, true) {
                        // A node that stops builds nothing.
                        let _ = self.shared.outgrown.send(Arc::clone(&self.template));
                    }
                }
                metrics::restored(name, Err(&why));
                if let Some(waiter) = self.waiters.pop_front() {
                    // It may have gone away.
                    let _ = waiter.send(Err(why.clone()));
                }
                self.failed(why);
            }
        }
    }

    /// For whoever waits longest, or for who comes next.
    fn became_ready(&mut self, vm: Paused, start: StartKind) {
        while let Some(waiter) = self.waiters.pop_front() {
            if !waiter.is_closed() {
                return self.grant(waiter, vm, start);
            }
        }
        self.ready.push_back(vm);
    }

    /// Rewinds a used VM, if there may be a use for it.
    fn used(&mut self, slot: Slot) {
        if self.supply() >= self.most_supply() + count(self.waiters.len()) {
            return; // it ends here
        }
        self.rewinding += 1;
        let (shared, outbox) = (Arc::clone(&self.shared), self.outbox.clone());
        tokio::spawn(async move {
            let rewound = shared.source.rewind(slot).await;
            let _ = outbox.send(Message::Rewound(Box::new(rewound)));
        });
    }

    /// VMs to keep ready: the target, and as many as were lately used at once, as long as there is memory. What is beyond costs more than
    /// a restore will.
    fn most_supply(&self) -> u32 {
        let surplus = if self.shared.admission.is_roomy() { self.peak.claimed } else { 0 };
        self.template.info().spec.pool.size + surplus
    }

    /// Somebody on the node is short of memory: keeps no more than the target.
    fn spare(&mut self) {
        self.peak = Peak::default();
        let target = self.template.info().spec.pool.size + count(self.waiters.len());
        while self.supply() > target && self.ready.pop_front().is_some() {}
    }

    fn rewound(&mut self, result: Result<Paused, RestoreError>) {
        let name = &self.template.info().spec.name;
        match result {
            Ok(vm) => {
                metrics::rewound(name, Ok(vm.took));
                self.became_ready(vm, StartKind::Paused);
            }
            // It is gone; a restore will take its place.
            Err(error) => metrics::rewound(name, Err(&error.to_string())),
        }
    }

    /// VMs that are ready, or will be without anyone's doing.
    fn supply(&self) -> u32 {
        count(self.ready.len()) + self.restoring + self.rewinding
    }

    fn failed(&mut self, why: String) {
        self.backoff.failed();
        self.last_failure = Some(why);
    }

    fn take_ready(&mut self) -> Option<Paused> {
        while let Some(vm) = self.ready.pop_front() {
            if vm.slot.vmm.is_alive() {
                return Some(vm);
            }
        }
        None
    }

    fn grant(&mut self, to: oneshot::Sender<Answer>, vm: Paused, start: StartKind) {
        self.claimed += 1;
        self.peak.claimed(self.claimed);
        // A claimer that has just gone away drops the grant, and with it the ticket, which counts it down again.
        let _ = to.send(Ok(Grant { vm, start, ticket: Ticket(self.outbox.clone()) }));
    }

    fn watch(&self, slot: &Slot) {
        let (end, id, outbox) = (slot.vmm.end(), slot.id, self.outbox.clone());
        tokio::spawn(async move {
            end.await;
            let _ = outbox.send(Message::Died(id));
        });
    }

    /// Starts what is missing: enough for the target and for everyone who waits, as far as the limits allow.
    fn refill(&mut self) {
        self.short_of = None;
        if self.outgrown {
            // No restore can succeed until the template has been built again, in a pool of its own. Whoever waits hears that.
            let why = self.last_failure.clone().unwrap_or_default();
            self.waiters.drain(..).for_each(|waiter| drop(waiter.send(Err(why.clone()))));
            return;
        }
        let spec = self.template.info().spec.pool;
        let waiting = count(self.waiters.len());
        let supply = self.supply();
        let unasked = if self.backoff.until().is_none() { spec.size } else { 0 };
        let missing = (unasked + waiting).saturating_sub(supply);
        let room = spec.max.saturating_sub(supply + self.claimed);
        for _ in 0..missing.min(room) {
            match self.shared.admission.admit(self.template.paused_charge()) {
                Ok(reservation) => self.start_restore(reservation),
                Err(full) => {
                    self.short_of = Some(full);
                    break;
                }
            }
        }
    }

    fn start_restore(&mut self, reservation: Reservation) {
        self.restoring += 1;
        let (shared, template, outbox) = (Arc::clone(&self.shared), Arc::clone(&self.template), self.outbox.clone());
        tokio::spawn(async move {
            // The semaphore is never closed.
            let _slot = shared.restores.acquire().await;
            let restored = shared.source.restore(template, reservation).await;
            // A drained pool wants it no more: the VM ends here.
            let _ = outbox.send(Message::Restored(Box::new(restored)));
        });
    }

    fn status(&self) -> PoolStatus {
        let spec = &self.template.info().spec;
        PoolStatus {
            template: spec.name.clone(),
            target: spec.pool.size,
            ready: count(self.ready.len()),
            restoring: self.restoring,
            rewinding: self.rewinding,
            claimed: self.claimed,
            waiting: count(self.waiters.len()),
            ready_pids: self.ready.iter().map(|vm| vm.slot.vmm.pid()).collect(),
            last_failure: self.last_failure.clone(),
            short_of: self.short_of,
        }
    }
}

/// The most VMs that were claimed at once lately.
#[derive(Debug, Default)]
struct Peak {
    claimed: u32,
    /// Releases since it was reached last, or lowered.
    since: u32,
}

impl Peak {
    /// Releases without a new peak after which it is lowered by one.
    const PATIENCE: u32 = 50;

    /// So many are claimed now.
    fn claimed(&mut self, now: u32) {
        if now >= self.claimed {
            *self = Self { claimed: now, since: 0 };
        }
    }

    fn released(&mut self) {
        self.since += 1;
        if self.since > Self::PATIENCE {
            *self = Self { claimed: self.claimed.saturating_sub(1), since: 0 };
        }
    }
}

/// Ends then; never, if there is no such time.
async fn after(then: Option<Instant>) {
    match then {
        Some(then) => tokio::time::sleep_until(then).await,
        None => std::future::pending().await,
    }
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
