//! What a process writes, for all who listen.
//!
//! Each subscriber has a queue of [`QUEUE`] frames. Whoever takes what it is sent misses nothing: where its queue is full the process is
//! held back, as a terminal would, until it takes more. But nobody is waited for who takes nothing at all: [`patience`] says how long, and
//! then its stream ends with an error, the process goes on, and it may connect again. With one subscriber that is long, since only itself is
//! kept waiting; with others beside it, short. One that has left is no subscriber any more from the next frame on.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::{
    sync::mpsc::{Receiver, Sender, channel, error::TrySendError},
    time::timeout,
};

/// Frames that wait for one subscriber: with 32 KiB of output in each, as base64, 1.4 MiB.
pub(super) const QUEUE: usize = 32;
const PATIENCE_ALONE: Duration = Duration::from_secs(60);
const PATIENCE_BESIDE_OTHERS: Duration = Duration::from_secs(2);

/// How long the process waits for a subscriber that takes nothing.
fn patience(subscribers: usize) -> Duration {
    if subscribers > 1 { PATIENCE_BESIDE_OTHERS } else { PATIENCE_ALONE }
}

/// Hands output to all subscribers.
#[derive(Debug, Default)]
pub(super) struct Hub(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    closed: bool,
    places: Vec<Place>,
}

#[derive(Debug, Clone)]
struct Place {
    queue: Sender<Bytes>,
    cut: Arc<AtomicBool>,
}

/// One who listens.
#[derive(Debug)]
pub(super) struct Subscriber {
    queue: Receiver<Bytes>,
    cut: Arc<AtomicBool>,
}

impl Subscriber {
    /// The next frame of output; none when there will be no more.
    pub(super) async fn next(&mut self) -> Option<Bytes> {
        self.queue.recv().await
    }

    /// Whether it was given up, so that output is missing.
    pub(super) fn was_cut(&self) -> bool {
        self.cut.load(Ordering::SeqCst)
    }
}

impl Hub {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on. After the end there is nothing to come.
    pub(super) fn subscribe(&self) -> Subscriber {
        let (sender, queue) = channel(QUEUE);
        let cut = Arc::new(AtomicBool::new(false));
        let mut state = self.state();
        if !state.closed {
            state.places.push(Place { queue: sender, cut: Arc::clone(&cut) });
        }
        Subscriber { queue, cut }
    }

    /// Sends what `frame` makes to all; makes nothing where nobody listens.
    pub(super) async fn publish(&self, frame: impl FnOnce() -> Bytes) {
        let places = {
            let mut state = self.state();
            state.places.retain(|place| !place.queue.is_closed());
            state.places.clone()
        };
        if places.is_empty() {
            return;
        }
        let (frame, patience) = (frame(), patience(places.len()));
        let full =
            places.iter().filter(|place| matches!(place.queue.try_send(frame.clone()), Err(TrySendError::Full(_))));
        join_all(full.map(|place| async {
            // One that leaves meanwhile is sorted out by the next frame.
            if timeout(patience, place.queue.send(frame.clone())).await.is_err() {
                place.cut.store(true, Ordering::SeqCst);
            }
        }))
        .await;
        self.state().places.retain(|place| !place.cut.load(Ordering::SeqCst));
    }

    /// There is no more output.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.places.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(number: usize) -> Bytes {
        Bytes::from(number.to_string())
    }

    #[tokio::test(start_paused = true)]
    async fn one_who_takes_nothing_is_given_up_and_the_others_miss_nothing() {
        let hub = Hub::default();
        let (mut reader, mut dead) = (hub.subscribe(), hub.subscribe());
        let published = async {
            for number in 0..10 * QUEUE {
                hub.publish(|| frame(number)).await;
            }
            hub.close();
        };
        let read = async {
            for number in 0..10 * QUEUE {
                assert_eq!(reader.next().await, Some(frame(number)));
            }
            assert_eq!(reader.next().await, None);
        };
        tokio::join!(published, read);
        assert!(!reader.was_cut() && dead.was_cut());
        // It can still read what it had got.
        for number in 0..QUEUE {
            assert_eq!(dead.next().await, Some(frame(number)));
        }
        assert_eq!(dead.next().await, None);
    }

    /// Slower than the patience for a whole queue, but never silent.
    #[tokio::test(start_paused = true)]
    async fn one_who_is_slow_misses_nothing() {
        let hub = Hub::default();
        let (mut slow, mut fast) = (hub.subscribe(), hub.subscribe());
        let published = async {
            for number in 0..4 * QUEUE {
                hub.publish(|| frame(number)).await;
            }
            hub.close();
        };
        let slowly = async {
            for number in 0..4 * QUEUE {
                tokio::time::sleep(PATIENCE_BESIDE_OTHERS / 2).await;
                assert_eq!(slow.next().await, Some(frame(number)));
            }
            assert_eq!((slow.next().await, slow.was_cut()), (None, false));
        };
        let quickly = async {
            for number in 0..4 * QUEUE {
                assert_eq!(fast.next().await, Some(frame(number)));
            }
        };
        tokio::join!(published, slowly, quickly);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_and_those_who_left_are_not_waited_for() {
        let hub = Hub::default();
        hub.publish(|| unreachable!("nobody listens")).await;
        let mut gone = hub.subscribe();
        for number in 0..QUEUE {
            hub.publish(|| frame(number)).await;
        }
        // It leaves while it is waited for.
        tokio::join!(hub.publish(|| frame(0)), async { gone.queue.close() });
        drop(gone);
        hub.publish(|| unreachable!("nobody listens")).await;
        hub.close();
        assert_eq!(hub.subscribe().next().await, None);
    }
}
