//! What it does where the node has no room: who goes on waiting, and what it gives up.

use stasis_pool_api::StartKind;

use super::{
    super::{
        Hot, Refusal,
        stock::{Ready, Vm as _, count},
        target::Target,
    },
    Actor,
};
use crate::{
    admission::{Charge, Place},
    metrics::{self, Eviction},
    restore::Paused,
};

impl Actor {
    /// Those who wait for VMs that can be started keep their place for the next of them. Those for whom nothing comes hear so at once, who came
    /// last first: the node is full, nothing on its way back suffices, and no VM of this pool serves anybody whose end would be their turn.
    pub(super) fn stand_in_line(&mut self, place: Option<Place>) {
        self.place = place;
        if self.no_capacity.is_some() && self.stock.claimed == 0 {
            let running = Charge::running(self.template.info());
            while self.stock.unserved() > 0
                && let Err(full) = self.shared.admission.foresee(&running, self.stock.unserved(), self.place.as_ref())
                && let Some(waiter) = self.stock.last_waiter()
            {
                metrics::refused(full.what.resource);
                // It may have gone away.
                let _ = waiter.send(Err(Refusal::Full(full)));
            }
        }
        // Who waits for its own pool's VMs has no hope that others would have to stand behind.
        if self.no_capacity.is_none() || self.stock.unserved() == 0 || self.stock.claimed > 0 {
            self.place = None;
        } else if self.place.is_none() {
            self.place = Some(self.shared.admission.line_up_for(&self.template.paused_charge()));
        }
    }

    /// Paused VMs beyond the target go when somebody is short of memory, which is known beforehand.
    pub(super) fn mark_spare(&mut self, target: &Target) {
        let beyond = self.stock.supply().saturating_sub(target.ready + self.stock.waiting());
        let paused = self.stock.paused();
        let spare = paused.len().min(beyond as usize);
        if (spare, self.spare) != (0, 0) {
            for (place, vm) in paused.iter().enumerate() {
                let promise = vm.slot.vmm.promise();
                if place < spare { promise.is_leaving() } else { promise.stays() }
            }
        }
        self.spare = spare;
    }

    /// Gives up as many paused VMs as have so much memory together; none if all of them have not.
    pub(super) fn make_room(&mut self, bytes: u64) -> bool {
        let each = self.template.paused_charge().own_bytes().max(1);
        let vms = bytes.div_ceil(each);
        if vms > u64::from(count(self.stock.paused().len())) {
            return false;
        }
        let given_up = (0..vms).map_while(|_| self.stock.give_up_paused()).count();
        metrics::evicted(&self.template.info().spec.name, Eviction::Room, given_up as u64);
        given_up > 0
    }

    /// A VM comes back that was granted, and has run for nobody.
    pub(super) fn untouched(&mut self, mut vm: Ready<Paused, Hot>) {
        let (lives, start) = match &mut vm {
            Ready::Paused(vm) => {
                vm.slot.is_paused();
                (vm.lives(), StartKind::Paused)
            }
            Ready::Hot(vm) => {
                // What it was asked before it was granted, nobody has heard the answer to.
                vm.answered();
                (vm.lives(), StartKind::Hot)
            }
        };
        self.released();
        if lives && let Some((waiter, vm)) = self.stock.came_back(vm) {
            self.grant(waiter, vm, start);
        }
    }
}
