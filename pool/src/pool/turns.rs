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

    /// As `take`, until then: whose turn has not come is told where it would stand now, and when to try again.
    pub(crate) async fn take_by(&self, flow: &Flow, urgency: Urgency, until: Instant) -> Result<Turn, Full> {
        match tokio::time::timeout_at(until, self.take(flow, urgency)).await {
            Ok(turn) => Ok(turn),
            Err(_) => Err(self.standing(flow, 1).has_not_come()),
        }
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
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use stasis_pool_api::Resource;

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
    async fn whose_turn_does_not_come_in_time_is_told_when_it_may() {
        let (turns, flow, other) = (Turns::new(1), Flow::new(1), Flow::new(1));
        let first = turns.take(&flow, Urgency::Claim).await;
        tokio::time::advance(Duration::from_secs(2)).await;
        drop(first);
        let taken = turns.take(&flow, Urgency::Claim).await;
        let _others: Vec<_> = (0..2).map(|_| turns.take(&flow, Urgency::Claim)).collect();
        let soon = Instant::now() + Duration::from_secs(1);
        let refused = turns.take_by(&other, Urgency::Claim, soon).await.unwrap_err();
        let place = u32::try_from(refused.what.needed).unwrap();
        assert_eq!((refused.what.resource, refused.what.available), (Resource::Starts, 0));
        assert!((1..=3).contains(&place), "{refused:?}");
        assert_eq!(refused.retry_after, Duration::from_secs(2) * place, "each takes two seconds");
        assert_eq!(turns.state().queued, 2 + 1, "its place is passed over when it comes");
        drop((taken, _others));
        let soon = Instant::now() + Duration::from_secs(1);
        assert!(turns.take_by(&other, Urgency::Claim, soon).await.is_ok());
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
