//! The task that owns a pool.

use std::{collections::VecDeque, sync::Arc};

use stasis_pool_api::{PoolStatus, StartKind};
use tokio::sync::{mpsc, oneshot, watch};

use super::{Answer, Grant, Message, Shared, Ticket};
use crate::{
    admission::Reservation,
    metrics,
    restore::{Paused, RestoreError},
    template::Template,
};

/// Failures in a row after which a pool no longer fills itself unasked; the next claim tries again.
const GIVE_UP_AFTER: u32 = 3;

pub(super) fn start(template: Arc<Template>, shared: Arc<Shared>) -> mpsc::UnboundedSender<Message> {
    let (sender, inbox) = mpsc::unbounded_channel();
    let actor = Actor {
        releases: shared.admission.releases(),
        template,
        shared,
        outbox: sender.clone(),
        ready: VecDeque::new(),
        waiters: VecDeque::new(),
        restoring: 0,
        claimed: 0,
        failures: 0,
        last_failure: None,
        short_of_memory: false,
    };
    tokio::spawn(actor.live(inbox));
    sender
}

struct Actor {
    template: Arc<Template>,
    shared: Arc<Shared>,
    outbox: mpsc::UnboundedSender<Message>,
    releases: watch::Receiver<()>,
    ready: VecDeque<Paused>,
    waiters: VecDeque<oneshot::Sender<Answer>>,
    restoring: u32,
    claimed: u32,
    failures: u32,
    last_failure: Option<String>,
    short_of_memory: bool,
}

impl Actor {
    async fn live(mut self, mut inbox: mpsc::UnboundedReceiver<Message>) {
        self.refill();
        loop {
            let message = tokio::select! {
                message = inbox.recv() => message,
                _ = self.releases.changed(), if self.short_of_memory => {
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
            Message::Released => self.claimed -= 1,
            Message::Proved => self.failures = 0,
            Message::Unproved(why) => self.failed(why),
            Message::Died(id) => {
                let before = self.ready.len();
                self.ready.retain(|vm| vm.id != id);
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
                while let Some(waiter) = self.waiters.pop_front() {
                    if !waiter.is_closed() {
                        return self.grant(waiter, vm, StartKind::Cold);
                    }
                }
                self.watch(&vm);
                self.ready.push_back(vm);
            }
            Err(error) => {
                let why = error.to_string();
                metrics::restored(name, Err(&why));
                if let Some(waiter) = self.waiters.pop_front() {
                    // It may have gone away.
                    let _ = waiter.send(Err(why.clone()));
                }
                self.failed(why);
            }
        }
    }

    fn failed(&mut self, why: String) {
        self.failures = self.failures.saturating_add(1);
        self.last_failure = Some(why);
    }

    fn take_ready(&mut self) -> Option<Paused> {
        while let Some(vm) = self.ready.pop_front() {
            if vm.vmm.is_alive() {
                return Some(vm);
            }
        }
        None
    }

    fn grant(&mut self, to: oneshot::Sender<Answer>, vm: Paused, start: StartKind) {
        self.claimed += 1;
        // A claimer that has just gone away drops the grant, and with it the ticket, which counts it down again.
        let _ = to.send(Ok(Grant { vm, start, ticket: Ticket(self.outbox.clone()) }));
    }

    fn watch(&self, vm: &Paused) {
        let (end, id, outbox) = (vm.vmm.end(), vm.id, self.outbox.clone());
        tokio::spawn(async move {
            end.await;
            let _ = outbox.send(Message::Died(id));
        });
    }

    /// Starts what is missing: enough for the target and for everyone who waits, as far as the limits allow.
    fn refill(&mut self) {
        self.short_of_memory = false;
        let spec = self.template.info().spec.pool;
        let waiting = count(self.waiters.len());
        let supply = count(self.ready.len()) + self.restoring;
        let unasked = if self.failures < GIVE_UP_AFTER { spec.size } else { 0 };
        let missing = (unasked + waiting).saturating_sub(supply);
        let room = spec.max.saturating_sub(supply + self.claimed);
        for _ in 0..missing.min(room) {
            match self.shared.admission.reserve(self.template.info().spec.memory_mib()) {
                Ok(reservation) => self.start_restore(reservation),
                Err(_) => {
                    self.short_of_memory = true;
                    break;
                }
            }
        }
        metrics::memory(self.shared.admission.total_mib(), self.shared.admission.available_mib());
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
            claimed: self.claimed,
            waiting: count(self.waiters.len()),
            ready_pids: self.ready.iter().map(|vm| vm.vmm.pid()).collect(),
            last_failure: self.last_failure.clone(),
        }
    }
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
