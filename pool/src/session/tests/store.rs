//! What becomes of sandboxes while their store cannot be written.

use std::sync::atomic::AtomicBool;

use stasis_pool_api::Timestamp;
use stasis_state::{Change, Notice, Page, Query, Record, StoreError};
use tokio::sync::broadcast;

use super::*;

/// A store whose disk is full while it is told so.
#[derive(Default)]
struct Full {
    store: MemoryStore,
    is_full: AtomicBool,
}

impl Full {
    fn writable(&self) -> Result<(), StoreError> {
        match self.is_full.load(SeqCst) {
            true => Err(StoreError::Unavailable { reason: "database or disk is full".into() }),
            false => Ok(()),
        }
    }
}

impl Store for Full {
    fn create(&self, record: Record) -> BoxFuture<'_, Result<(), StoreError>> {
        async {
            self.writable()?;
            self.store.create(record).await
        }
        .boxed()
    }
    fn get<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, Result<Record, StoreError>> {
        self.store.get(id)
    }
    fn list(&self, query: Query) -> BoxFuture<'_, Result<Page, StoreError>> {
        self.store.list(query)
    }
    fn commit(&self, change: Change) -> BoxFuture<'_, Result<Record, StoreError>> {
        async {
            self.writable()?;
            self.store.commit(change).await
        }
        .boxed()
    }
    fn discard<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
        self.store.discard(id)
    }
    fn due(&self, by: Timestamp, limit: usize) -> BoxFuture<'_, Result<Page, StoreError>> {
        self.store.due(by, limit)
    }
    fn next_due(&self) -> BoxFuture<'_, Result<Option<Timestamp>, StoreError>> {
        self.store.next_due()
    }
    fn notices(&self) -> broadcast::Receiver<Notice> {
        self.store.notices()
    }
}

#[tokio::test]
async fn nothing_new_is_begun_and_what_runs_goes_on() {
    let store = Arc::new(Full::default());
    let bench = Bench::storing_in(Arc::clone(&store)).await;
    let id = bench.create("").await;
    let asleep = bench.create("").await;
    within(bench.sandboxes.pause(&asleep, PauseTo::Ram)).await.unwrap();
    let before = bench.free_mib();

    store.is_full.store(true, SeqCst);
    let new: NewSandbox = serde_json::from_str(r#"{"template":"x"}"#).unwrap();
    let refused = within(bench.sandboxes.create(new, LIMIT)).await.unwrap_err();
    assert!(matches!(refused, SandboxError::Store { .. }) && refused.to_string().contains("disk is full"), "{refused}");
    assert_eq!(bench.free_mib(), before, "no VM was started for it");
    let refused = within(bench.sandboxes.pause(&id, PauseTo::Ram)).await.unwrap_err();
    assert!(matches!(refused, SandboxError::Store { .. }), "{refused}");
    let refused = within(bench.sandboxes.timeout(&id, LIMIT)).await.unwrap_err();
    assert!(matches!(refused, SandboxError::Store { .. }), "{refused}");
    let refused = within(bench.sandboxes.hold(&id, "ci".parse().unwrap(), None)).await.unwrap_err();
    assert!(matches!(refused, SandboxError::Store { .. }), "{refused}");
    let refused = within(bench.sandboxes.fork(&id, 1, LIMIT)).await.unwrap_err();
    assert!(refused.to_string().contains("disk is full"), "{refused}");
    assert_eq!(bench.free_mib(), before, "no child was started");
    // One that sleeps is not resumed, since nobody could tell afterwards that it ran.
    assert!(within(bench.sandboxes.resume(&asleep, None)).await.is_err());
    assert_eq!(bench.show(&asleep).await.state, State::Suspended);
    assert_eq!(bench.show(&id).await.state, State::Running);

    store.is_full.store(false, SeqCst);
    let mut visit = within(bench.sandboxes.visit(&id, LIMIT)).await.unwrap();
    let mut said = [0; 5];
    within(visit.stream.read_exact(&mut said)).await.unwrap();
    let (_, resumed) = within(bench.sandboxes.resume(&asleep, None)).await.unwrap();
    assert!(resumed);
}

#[tokio::test]
async fn requests_are_served_while_nothing_can_be_written() {
    let store = Arc::new(Full::default());
    let bench = Bench::storing_in(Arc::clone(&store)).await;
    let id = bench.create("").await;
    store.is_full.store(true, SeqCst);
    for _ in 0..3 {
        let mut visit = within(bench.sandboxes.visit(&id, LIMIT)).await.unwrap();
        let mut said = [0; 5];
        within(visit.stream.read_exact(&mut said)).await.unwrap();
        assert_eq!((&said, visit.start), (b"hello", StartKind::Running));
    }
}

#[tokio::test]
async fn a_store_that_cannot_be_used_is_shown_as_down_until_it_can() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let _here = ::metrics::set_default_local_recorder(&recorder);
    let is_up = || {
        let shown = recorder.handle().render();
        shown.lines().find_map(|line| line.strip_prefix("stasis_store_up ")).map(str::to_owned)
    };
    let store = Arc::new(super::super::Measured(Full::default()));
    let bench = Bench::storing_in(Arc::clone(&store)).await;
    bench.create("").await;
    assert_eq!(is_up().as_deref(), Some("1"));
    store.0.is_full.store(true, SeqCst);
    let new = serde_json::from_str(r#"{"template":"x"}"#).unwrap();
    let refused = within(bench.sandboxes.create(new, LIMIT)).await;
    assert!(matches!(refused, Err(SandboxError::Store { .. })), "{refused:?}");
    assert_eq!(is_up().as_deref(), Some("0"));
    store.0.is_full.store(false, SeqCst);
    bench.create("").await;
    assert_eq!(is_up().as_deref(), Some("1"));
}
