//! The line of those who wait for what is on its way back.

use tokio::time::Instant;

use super::{
    Admission, Charge, Full,
    budget::{Amount, Asker, Refused},
};

/// A place in the line, until dropped: what comes back is not given to those behind it.
#[derive(Debug)]
pub(crate) struct Place {
    admission: Admission,
    number: u64,
}

impl Place {
    pub(super) const fn asker(&self) -> Asker {
        Asker::InLine(self.number)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.admission.books().budget.leave(self.number);
        // Those behind it may have been refused because of it.
        self.admission.stir();
    }
}

impl Admission {
    /// A place at the line's end, for one of these.
    pub(crate) fn line_up_for(&self, charge: &Charge) -> Place {
        self.line_up(charge.amount())
    }

    /// A place at the line's end, for so much.
    pub(super) fn line_up(&self, amount: Amount) -> Place {
        Place { admission: self.clone(), number: self.books().budget.line_up(amount) }
    }

    /// Tries at once, and then, in the line for `amount`, at every change: as long as there is hope, or `others` may give up what it needs, and
    /// until then. Who has a place already keeps it, whatever comes of this.
    pub(super) async fn in_line<T>(
        &self,
        amount: Amount,
        place: &mut Option<Place>,
        until: Option<Instant>,
        others: impl Fn() -> bool,
        attempt: impl Fn(Asker) -> Result<T, Refused>,
    ) -> Result<T, Full> {
        // From before the attempt on: whatever changes behind it is heard.
        let mut changes = self.changes();
        let mut refused = match attempt(place.as_ref().map_or(Asker::New, Place::asker)) {
            Ok(done) => return Ok(done),
            Err(refused) => refused,
        };
        let may_wait = |refused: &Refused| {
            // What is more than there is at all does not come by waiting.
            refused.has_hope || (refused.full.needed <= refused.full.limit && others())
        };
        if !may_wait(&refused) {
            return Err(self.full(refused));
        }
        let place = place.get_or_insert_with(|| self.line_up(amount));
        loop {
            match attempt(place.asker()) {
                Ok(done) => return Ok(done),
                Err(again) => refused = again,
            }
            let heard = match until {
                _ if !may_wait(&refused) => false,
                None => changes.changed().await.is_ok(),
                Some(until) => matches!(tokio::time::timeout_at(until, changes.changed()).await, Ok(Ok(()))),
            };
            if !heard {
                return Err(self.full(refused));
            }
        }
    }
}
