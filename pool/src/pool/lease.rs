//! A claimed VM: whose it is, and how it comes back.

use std::sync::{Mutex, PoisonError};

use stasis_guest_wire::wake::Certificate;
use stasis_pool_api::{Claim, Lease, StartKind, TemplateInfo, Timings};
use tokio::{net::UnixStream, sync::mpsc};

use super::{
    LAST_WORDS, Message, Place,
    grant::{Served, Ticket},
};
use crate::restore::Slot;

/// A VM that was taken, woken and proved. Dropping it gives the VM back.
pub(crate) struct Taken {
    pub(super) template: TemplateInfo,
    pub(super) start: StartKind,
    pub(super) timings: Timings,
    pub(super) stream: UnixStream,
    pub(super) certificate: Certificate,
    pub(super) lease: VmLease,
}

impl Taken {
    /// Takes the VM out of its pool for good: it no longer counts as claimed, and never comes back.
    pub(crate) fn keep(self) -> Option<(Slot, Certificate)> {
        // No request has been served: how long that took says nothing of how long requests take.
        let places = self.lease.places.lock().unwrap_or_else(PoisonError::into_inner).take();
        places.into_iter().flatten().for_each(Place::give_back_unused);
        self.lease.take().map(|slot| (slot, self.certificate))
    }

    /// Which VM it is, through all its lives.
    #[cfg(test)]
    pub(crate) fn slot(&self) -> Option<uuid::Uuid> {
        self.lease.slot.lock().unwrap().as_ref().map(|slot| slot.id)
    }

    /// Holds a place among the template's claims, and one among the tenant's, until the VM is given back.
    pub(crate) fn holding(mut self, places: [Place; 2]) -> Self {
        self.lease.places = Mutex::new(Some(places));
        self
    }
}

impl From<Taken> for Claim {
    fn from(taken: Taken) -> Self {
        let Taken { template, start, timings, stream, lease, .. } = taken;
        Self { vm: lease.id, template, start, timings, stream: Box::new(stream), lease: Box::new(lease) }
    }
}

/// Ownership of a claimed VM.
pub(super) struct VmLease {
    id: uuid::Uuid,
    /// Until it has been given back, or away.
    slot: Mutex<Option<Slot>>,
    pool: mpsc::UnboundedSender<Message>,
    _ticket: Ticket,
    /// Until the answer is complete.
    places: Mutex<Option<[Place; 2]>>,
    _served: Served,
}

impl VmLease {
    pub(super) fn new(
        id: uuid::Uuid,
        slot: Slot,
        pool: mpsc::UnboundedSender<Message>,
        ticket: Ticket,
        served: Served,
    ) -> Self {
        Self { id, slot: Mutex::new(Some(slot)), pool, _ticket: ticket, places: Mutex::new(None), _served: served }
    }

    fn take(&self) -> Option<Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Lease for VmLease {
    fn served(&self) {
        drop(self.places.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    fn report_failure(&self, request: &str, reason: &str) {
        let (Some(slot), vm) = (self.take(), self.id) else { return };
        let (request, reason) = (request.to_owned(), reason.to_owned());
        slot.vmm.promise().is_leaving();
        // The task keeps the VM until its console is read: a function that died took the guest's last words with it a moment ago. A VM
        // that failed is not used again.
        tokio::spawn(async move {
            let template = &slot.template.info().spec.name;
            let _ = tokio::time::timeout(LAST_WORDS, slot.vmm.ended()).await;
            // A process that answers nothing has no last words, and must go all the same.
            let console = tokio::time::timeout(LAST_WORDS, slot.vmm.console()).await.unwrap_or_default();
            tracing::warn!(%template, %vm, %request, reason, console, "the function broke a request off");
        });
    }
}

impl Drop for VmLease {
    fn drop(&mut self) {
        if let Some(slot) = self.take().filter(|slot| slot.vmm.is_alive()) {
            // Before it no longer counts as serving: whoever waits for what it has goes on waiting.
            slot.comes_back();
            // A drained pool takes nothing back: the VM ends here.
            let _ = self.pool.send(Message::Used(Box::new(slot)));
        }
    }
}
