//! Pause against request, ten thousand times, on the real store, with a fake VM and random delays.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "that is how tests fail")]

mod node;

use std::{
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};

use node::{Counts, Sandbox};
use stasis_state::{Query, SqliteStore, State, Store};

/// Rounds in all: each is one pause that falls due, and one to three requests, at random distances.
const ROUNDS: u64 = 10_000;
const SANDBOXES: u64 = 40;
/// The test fails then.
const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn pause_against_request_ten_thousand_times() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build().unwrap();
    runtime.block_on(async {
        let store: Arc<dyn Store> = Arc::new(SqliteStore::open(&folder.path().join("state.db")).unwrap());
        let counts = tokio::time::timeout(LIMIT, all_rounds(&store)).await.expect("the rounds hang: a request is lost");
        let requests = counts.requests.load(SeqCst);
        assert_eq!(counts.executed.load(SeqCst), requests, "each request runs once");
        // Each kind of meeting did take place.
        for (what, count) in [
            ("paused", &counts.paused),
            ("called off", &counts.called_off),
            ("called off behind the stop", &counts.called_off_after_stop),
            ("resumed", &counts.resumed),
        ] {
            assert!(count.load(SeqCst) > 0, "never {what}: {counts:?}");
        }
        let page = store.list(Query { limit: 1_000, ..Query::default() }).await.unwrap();
        assert_eq!(page.records.len() as u64, SANDBOXES);
        assert!(page.records.iter().all(|record| matches!(record.state(), State::Running | State::Suspended)));
    });
}

async fn all_rounds(store: &Arc<dyn Store>) -> Arc<Counts> {
    let counts = Arc::new(Counts::default());
    let sandboxes: Vec<_> = (0..SANDBOXES)
        .map(|number| {
            let (store, counts) = (Arc::clone(store), Arc::clone(&counts));
            tokio::spawn(async move {
                let sandbox = Sandbox::make(&format!("sb-{number}"), store, counts).await;
                let mut random = Random(number + 1);
                for _ in 0..ROUNDS / SANDBOXES {
                    round(&sandbox, &mut random).await;
                }
            })
        })
        .collect();
    for sandbox in sandboxes {
        sandbox.await.unwrap();
    }
    counts
}

async fn round(sandbox: &Arc<Sandbox>, random: &mut Random) {
    let mut meeting = Vec::new();
    let delay = random.delay();
    let paused = Arc::clone(sandbox);
    meeting.push(tokio::spawn(async move {
        delay.wait().await;
        paused.time_passes().await;
    }));
    for _ in 0..=random.below(3) {
        let delay = random.delay();
        let requested = Arc::clone(sandbox);
        meeting.push(tokio::spawn(async move {
            delay.wait().await;
            requested.request().await;
        }));
    }
    for one in meeting {
        one.await.unwrap();
    }
}

/// Enough of a generator for delays (xorshift): the same numbers in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }

    fn delay(&mut self) -> Delay {
        match self.below(3) {
            0 => Delay::Turns(self.below(8)),
            1 => Delay::Turns(0),
            _ => Delay::Time(Duration::from_micros(self.below(3_000))),
        }
    }
}

/// How long one comes behind the other.
#[derive(Debug, Clone, Copy)]
enum Delay {
    /// So many turns of the scheduler.
    Turns(u64),
    /// A time.
    Time(Duration),
}

impl Delay {
    async fn wait(self) {
        match self {
            Self::Turns(turns) => {
                for _ in 0..turns {
                    tokio::task::yield_now().await;
                }
            }
            Self::Time(time) => tokio::time::sleep(time).await,
        }
    }
}
