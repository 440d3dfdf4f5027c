//! What was promised to one VM or process.
//!
//! ```text
//!            change                        is_leaving, becomes
//!  held ◀───────────────▶ held otherwise ─────────────────────▶ on its way back ──dropped──▶ given back
//!    ▲                                                            │
//!    └──────────────────────── change, stays ─────────────────────┘
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

use super::{
    Admission, Charge, Full, Place,
    budget::{Amount, Asker, Holding, Refused},
};

/// It, until dropped.
#[derive(Debug)]
pub(crate) struct Reservation(Promise);

/// The same, for whoever changes what it is: it does not keep it.
#[derive(Debug, Clone)]
pub(crate) struct Promise {
    admission: Admission,
    /// None when it was given back.
    held: Arc<Mutex<Option<Holding>>>,
}

impl Reservation {
    /// Of what the admission has given.
    pub(super) fn new(admission: Admission, held: Holding) -> Self {
        Self(Promise { admission, held: Arc::new(Mutex::new(Some(held))) })
    }

    /// For whoever changes what is promised.
    pub(crate) fn promise(&self) -> Promise {
        self.0.clone()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(held) = self.0.held().take() {
            // Giving all back is never refused.
            let _ = self.0.admission.exchange(&held, &Holding::default(), Asker::New);
        }
    }
}

impl Promise {
    fn held(&self) -> MutexGuard<'_, Option<Holding>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has it be that from now on, or says at once that what is more is not there. One that was given back stays so.
    pub(crate) fn change(&self, wanted: &Charge) -> Result<(), Full> {
        self.exchange(&Holding::of(wanted.clone()), Asker::New).map_err(|refused| self.admission.full(refused))
    }

    /// As `change`, and waits until then while what is on its way back suffices, or `others` may give up what it needs.
    pub(crate) async fn change_until(
        &self,
        wanted: &Charge,
        place: &mut Option<Place>,
        until: Instant,
        others: impl Fn() -> bool,
    ) -> Result<(), Full> {
        let more = self.more(wanted);
        let wanted = Holding::of(wanted.clone());
        self.admission.in_line(more, place, Some(until), others, |asker| self.exchange(&wanted, asker)).await
    }

    /// A place in the line for what it lacks.
    pub(crate) fn line_up(&self, wanted: &Charge) -> Place {
        self.admission.line_up(self.more(wanted))
    }

    fn more(&self, wanted: &Charge) -> Amount {
        let held = self.held().as_ref().map(|held| held.now.amount()).unwrap_or_default();
        wanted.amount().without(held)
    }

    /// It is on its way back: its process ends, or would if the memory were needed.
    pub(crate) fn is_leaving(&self) {
        self.becomes(&Charge::default());
    }

    /// The opposite.
    pub(crate) fn stays(&self) {
        self.foresee(|now| now.clone());
    }

    /// So much will be left of it soon.
    pub(crate) fn becomes(&self, later: &Charge) {
        self.foresee(|_| later.clone());
    }

    fn foresee(&self, later: impl FnOnce(&Charge) -> Charge) {
        let mut held = self.held();
        let Some(holding) = held.as_mut() else { return };
        let wanted = Holding { now: holding.now.clone(), later: later(&holding.now) };
        // What does not grow is never refused.
        if wanted != *holding && self.admission.exchange(holding, &wanted, Asker::New).is_ok() {
            *holding = wanted;
        }
    }

    fn exchange(&self, wanted: &Holding, asker: Asker) -> Result<(), Refused> {
        let mut held = self.held();
        if let Some(held) = held.as_mut() {
            self.admission.exchange(held, wanted, asker)?;
            *held = wanted.clone();
        }
        Ok(())
    }
}
