//! What it does about its hot tier.

use std::sync::Arc;

use stasis_pool_api::StartKind;
use tokio::time::Instant;
use uuid::Uuid;

use super::{
    super::{
        Hot, Message, REPAIR_LIMIT, Turn, Urgency,
        stock::{Ready, Vm as _},
        target::Target,
    },
    Actor,
};
use crate::{
    metrics::{self, Eviction},
    restore::RestoreError,
};

impl Actor {
    /// Asks for turns to make VMs hot, as far as paused ones are there and hot ones are missing.
    pub(super) fn warm(&mut self, target: &Target) {
        if self.stock.waiting() > 0 || self.has_no_room_to_run || self.backoff.until().is_some() {
            return;
        }
        for _ in self.turns_asked..self.stock.short_of_hot(target.hot) {
            self.turns_asked += 1;
            let (shared, flow) = (Arc::clone(&self.shared), self.flow.clone());
            self.begin(async move {
                let place = shared.warmings.take(&flow, Urgency::Background).await;
                Message::MayWarm([place, shared.wakes.take(&flow, Urgency::Background).await])
            });
        }
    }

    /// Until now the VM could still be claimed.
    pub(super) fn may_warm(&mut self, turns: [Turn; 2]) {
        self.turns_asked -= 1;
        let hot = self.target().hot;
        let Some(vm) = self.stock.warm(hot) else { return };
        if vm.slot.may_run_now().is_err() {
            // It stays as it is until something comes free.
            self.has_no_room_to_run = true;
            self.stock.warming -= 1;
            if let Some((waiter, vm)) = self.stock.arrived(Ready::Paused(vm)) {
                self.grant(waiter, vm, StartKind::Paused);
            }
            return;
        }
        self.begin(async move {
            let woken = vm.wake(REPAIR_LIMIT).await.map(Hot::from);
            drop(turns);
            Message::Warmed(Box::new(woken))
        });
    }

    /// A hot VM's connection is of no use any more.
    pub(super) fn spoiled(&mut self, place: usize) {
        let Some(hot) = self.stock.remove_hot(place) else { return };
        let name = &self.template.info().spec.name;
        if !hot.lives() {
            metrics::evicted(name, Eviction::Ended, 1);
            return self.failed("the process of a VM that stood ready ended".into());
        }
        if !hot.is_old() {
            metrics::evicted(name, Eviction::Disconnected, 1);
            return self.failed(
                "a hot VM's connection was closed before anything was asked: by the function, or its process ended"
                    .into(),
            );
        }
        self.stock.warming += 1;
        self.begin(async move { Message::Warmed(Box::new(hot.reconnect().await)) });
    }

    /// Asks the agents of hot VMs for which it is time whether they are there.
    pub(super) fn ask(&mut self) {
        let now = Instant::now();
        let due = self.stock.hot_mut().iter_mut().filter(|vm| vm.ask_at().is_some_and(|then| then <= now));
        let asked: Vec<_> = due.map(|vm| (vm.awake.id, vm.ask())).collect();
        for (life, answer) in asked {
            self.begin(async move { Message::Asked(life, answer.await) });
        }
    }

    /// A hot VM that does not answer makes room for another. One that was claimed meanwhile is its caller's.
    pub(super) fn asked(&mut self, life: Uuid, answer: Result<(), RestoreError>) {
        let name = &self.template.info().spec.name;
        let Some(place) = self.stock.hot().iter().position(|vm| vm.awake.id == life) else { return };
        match answer {
            Ok(()) => {
                metrics::hot_vm_asked(name, Ok(()));
                self.stock.hot_mut().iter_mut().skip(place).take(1).for_each(Hot::answered);
            }
            Err(error) => {
                let why = format!("a hot VM was destroyed because it does not answer: {error}");
                metrics::hot_vm_asked(name, Err(&why));
                metrics::evicted(name, Eviction::Unanswered, 1);
                self.stock.remove_hot(place);
                self.failed(why);
            }
        }
    }
}
