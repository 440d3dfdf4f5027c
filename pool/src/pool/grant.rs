//! A VM on its way from its pool to whoever asked for it.
//!
//! ```text
//!  stock ──granted──▶ Grant ──it is woken, or was hot──▶ leased
//!    ▲                  └─ dropped: nobody has it, and it has run for nobody
//!    └──────────────────┘
//! ```

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use stasis_pool_api::StartKind;
use tokio::sync::mpsc;

use super::{Hot, Message, stock::Ready};
use crate::{admission::Admission, metrics, restore::Paused};

/// Counts as a claimed VM until dropped.
pub(super) struct Ticket(Option<mpsc::UnboundedSender<Message>>);

impl Ticket {
    pub(super) const fn new(pool: mpsc::UnboundedSender<Message>) -> Self {
        Self(Some(pool))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(pool) = self.0.take()
            && pool.send(Message::Released).is_err()
        {
            metrics::drained(1);
        }
    }
}

/// A VM that was taken from the pool, which gets it back as it is if this is dropped.
pub(super) struct Grant {
    vm: Option<Ready<Paused, Hot>>,
    pub(super) start: StartKind,
    ticket: Option<Ticket>,
}

impl Grant {
    pub(super) const fn new(vm: Ready<Paused, Hot>, start: StartKind, ticket: Ticket) -> Self {
        Self { vm: Some(vm), start, ticket: Some(ticket) }
    }

    /// The VM, if it must be woken yet.
    pub(super) const fn paused(&self) -> Option<&Paused> {
        match &self.vm {
            Some(Ready::Paused(vm)) => Some(vm),
            _ => None,
        }
    }

    /// From now on the VM is used; None never comes.
    pub(super) fn used(mut self) -> Option<(Ready<Paused, Hot>, Ticket)> {
        self.vm.take().zip(self.ticket.take())
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        let pool = self.ticket.take().and_then(|mut ticket| ticket.0.take());
        // A drained pool takes nothing back: the VM ends here.
        if let (Some(vm), Some(pool)) = (self.vm.take(), pool)
            && pool.send(Message::Untouched(Box::new(vm))).is_err()
        {
            metrics::drained(1);
        }
    }
}

/// How many of a pool's VMs serve somebody now. The end of each may give what another needs to run.
#[derive(Debug, Clone)]
pub(super) struct Serving {
    count: Arc<AtomicU32>,
    admission: Admission,
}

impl Serving {
    pub(super) fn new(admission: Admission) -> Self {
        Self { count: Arc::default(), admission }
    }

    pub(super) fn is_any(&self) -> bool {
        self.count.load(Ordering::SeqCst) > 0
    }

    /// One more, until dropped.
    pub(super) fn begins(&self) -> Served {
        self.count.fetch_add(1, Ordering::SeqCst);
        Served(self.clone())
    }
}

/// A VM that serves.
pub(super) struct Served(Serving);

impl Drop for Served {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            // Whoever waited for it in vain hears so.
            self.0.admission.stir();
        }
    }
}
