//! Turns: permission to use the processors for a restore or a repair, handed out in the order of [`Fair`].

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use tokio::sync::oneshot;

use super::fair::Fair;

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
pub(crate) struct Turns(Arc<Mutex<Fair<oneshot::Sender<Turn>>>>);

/// A turn, until dropped.
#[derive(Debug)]
pub(crate) struct Turn(Option<Turns>);

impl Turns {
    pub(crate) fn new(at_once: usize) -> Self {
        Self(Arc::new(Mutex::new(Fair::new(at_once))))
    }

    /// Waits for one. Whoever leaves meanwhile gives up its place.
    pub(crate) async fn take(&self, flow: &Flow, urgency: Urgency) -> Turn {
        let (hand, taken) = oneshot::channel();
        self.lock().push(flow.id, flow.weight.load(Ordering::Relaxed), hand, urgency == Urgency::Claim);
        self.hand_out();
        // The sender is in the queue until it is used, and the queue is ours.
        taken.await.unwrap_or(Turn(None))
    }

    /// Callers wait for what this many of the flow's turns will bring.
    pub(crate) fn hurry(&self, flow: &Flow, claims: usize) {
        self.lock().hurry(flow.id, claims);
    }

    /// How many there are at a time, and are taken now.
    pub(crate) fn state(&self) -> stasis_pool_api::Turns {
        let (limit, under_way) = self.lock().state();
        stasis_pool_api::Turns { limit: limit as u64, under_way: under_way as u64 }
    }

    fn hand_out(&self) {
        loop {
            let Some(next) = self.lock().next() else { return };
            if let Err(mut unwanted) = next.send(Turn(Some(self.clone()))) {
                // Its owner has left. Not by dropping it: that would come back here, once deeper for each of them.
                unwanted.0 = None;
                self.lock().done();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Fair<oneshot::Sender<Turn>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(turns) = self.0.take() {
            turns.lock().done();
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
