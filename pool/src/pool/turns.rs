//! Turns: permission to use the processors for a restore or a repair, handed out in the order of [`Fair`].

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use tokio::{sync::oneshot, time::Instant};

use super::{
    fair::Fair,
    rate::{Pace, Standing},
};
use crate::{admission::Full, metrics};

/// Whose turns they are. Each pool is one; so is each sandbox that is brought back.
#[derive(Debug, Clone)]
pub(crate) struct Flow {
    id: u64,
    weight: Arc<AtomicU32>,
}

impl Flow {
    /// One that nobody else is.
    pub(crate) fn new(weight: u32) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self { id: NEXT.fetch_add(1, Ordering::Relaxed), weight: Arc::new(AtomicU32::new(weight)) }
    }

    /// Gives it another share, beside those of the others.
    pub(crate) fn weigh(&self, weight: u32) {
        self.weight.store(weight, Ordering::Relaxed);
    }
}

/// Whether somebody waits for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// A caller does.
    Claim,
    /// It is made in advance.
    Background,
}

/// So many turns at a time.
#[derive(Debug, Clone)]
pub(crate) struct Turns(Arc<Mutex<Desk>>);

#[derive(Debug)]
struct Desk {
    line: Fair<oneshot::Sender<Turn>>,
    pace: Pace,
    gauges: Option<metrics::Turns>,
}

impl Desk {
    fn show(&self) {
        if let Some(gauges) = &self.gauges {
            gauges.show(self.line.state().1, self.line.waiting());
        }
    }
}

/// A turn, until dropped, and since when.
#[derive(Debug)]
pub(crate) struct Turn(Option<(Turns, Instant)>);

impl Turns {
    pub(crate) fn new(at_once: usize) -> Self {
        Self(Arc::new(Mutex::new(Desk { line: Fair::new(at_once), pace: Pace::default(), gauges: None })))
    }

    /// The same, with series that say what the turns are for.
    pub(crate) fn shown_as(what: &'static str, at_once: usize) -> Self {
        let turns = Self::new(at_once);
        turns.lock().gauges = Some(metrics::Turns::of(what, at_once));
        turns
    }

    /// Stands in line from now on, and waits for one. Whoever leaves meanwhile gives up its place.
    pub(crate) fn take(&self, flow: &Flow, urgency: Urgency) -> impl Future<Output = Turn> + Send + use<> {
        let (hand, taken) = oneshot::channel();
        self.lock().line.push(flow.id, flow.weight.load(Ordering::Relaxed), hand, urgency == Urgency::Claim);
        self.hand_out();
        // The sender is in the queue until it is used, and the queue is ours.
        async { taken.await.unwrap_or(Turn(None)) }
    }

    /// The same for a caller who waits until then and no longer.
    ///
    /// # Errors
    /// Its turn has not come.
    pub(crate) async fn take_by(&self, flow: &Flow, until: Instant) -> Result<Turn, Full> {
        let turn = self.take(flow, Urgency::Claim);
        tokio::time::timeout_at(until, turn).await.map_err(|_| {
            let full = self.standing(flow, 1).is_too_late();
            metrics::refused(full.what.resource);
            full
        })
    }

    /// Callers wait for what this many of the flow's turns will bring.
    pub(crate) fn hurry(&self, flow: &Flow, claims: usize) {
        self.lock().line.hurry(flow.id, claims);
    }

    /// How many of the flow stand in line.
    pub(crate) fn waiting_of(&self, flow: &Flow) -> usize {
        self.lock().line.waiting_of(flow.id)
    }

    /// Where the `nth` of the flow's turns that callers wait for would stand now, 1 for the first.
    pub(crate) fn standing(&self, flow: &Flow, nth: usize) -> Standing {
        let desk = self.lock();
        let (at_once, taken) = desk.line.state();
        let ahead = desk.line.ahead(flow.id, flow.weight.load(Ordering::Relaxed), nth);
        Standing {
            number: (ahead + 1).saturating_sub(at_once.saturating_sub(taken)),
            per_second: desk.pace.per_second(at_once),
            at_once,
        }
    }

    /// How many there are at a time, are taken now and are waited for, and how fast they begin.
    pub(crate) fn state(&self) -> stasis_pool_api::Turns {
        let desk = self.lock();
        let ((limit, under_way), queued) = (desk.line.state(), desk.line.waiting());
        let per_s = desk.pace.per_second(limit);
        stasis_pool_api::Turns { limit: limit as u64, under_way: under_way as u64, queued: queued as u64, per_s }
    }

    fn hand_out(&self) {
        loop {
            let next = {
                let mut desk = self.lock();
                let next = desk.line.next();
                desk.show();
                next
            };
            let Some(next) = next else { return };
            if let Err(mut unwanted) = next.send(Turn(Some((self.clone(), Instant::now())))) {
                // Its owner has left. Not by dropping it: that would come back here, once deeper for each of them.
                unwanted.0 = None;
                self.lock().line.done();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Desk> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some((turns, since)) = self.0.take() {
            let mut desk = turns.lock();
            desk.line.done();
            desk.pace.ended(since.elapsed());
            drop(desk);
            turns.hand_out();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn claims_come_first_and_who_leaves_gives_up_its_place() {
        let (turns, flow, other) = (Turns::new(1), Flow::new(1), Flow::new(1));
        let first = turns.take(&flow, Urgency::Background).await;
        let (mut second, mut third, mut claim) = (
            Box::pin(turns.take(&flow, Urgency::Background)),
            Box::pin(turns.take(&flow, Urgency::Background)),
            Box::pin(turns.take(&other, Urgency::Claim)),
        );
        assert!((&mut second).now_or_never().is_none());
        assert!((&mut third).now_or_never().is_none());
        assert!((&mut claim).now_or_never().is_none());
        drop(first);
        let claim = claim.now_or_never().expect("the claim is next");
        assert!((&mut second).now_or_never().is_none(), "two at once");
        drop(second);
        drop(claim);
        let third = third.now_or_never().expect("who left is passed over");
        drop(third);
        assert!(turns.take(&flow, Urgency::Background).now_or_never().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_until_then_is_told_what_was_missing_and_leaves_the_line() {
        let (turns, flow) = (Turns::new(1), Flow::new(1));
        let by = |seconds| Instant::now() + std::time::Duration::from_secs(seconds);
        let first = turns.take_by(&flow, by(0)).await.expect("one is free");
        let (ahead, other) = (Flow::new(1), Flow::new(1));
        let mut waits = Box::pin(turns.take(&ahead, Urgency::Claim));
        assert!((&mut waits).now_or_never().is_none());
        let full = turns.take_by(&other, by(5)).await.unwrap_err();
        assert_eq!((full.what.needed, full.what.available, full.what.limit), (2, 0, 1), "behind one other");
        assert!(full.retry_after >= std::time::Duration::from_secs(1));
        drop(first);
        drop(waits.await);
        assert!(turns.take_by(&other, by(5)).await.is_ok());
        assert_eq!(turns.state().queued, 0);
    }

    #[tokio::test]
    async fn a_turn_that_was_never_picked_up_comes_back() {
        let (turns, flow) = (Turns::new(1), Flow::new(1));
        let first = turns.take(&flow, Urgency::Claim).await;
        let mut waiting: Vec<_> = (0..10_000).map(|_| Box::pin(turns.take(&flow, Urgency::Claim))).collect();
        for one in &mut waiting {
            assert!(one.now_or_never().is_none());
        }
        drop(first); // the next one has it now, without knowing
        drop(waiting);
        assert!(turns.take(&flow, Urgency::Claim).now_or_never().is_some());
    }
}
