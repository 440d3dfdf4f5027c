//! A store, measured: how long each operation takes, how it ends, and how often somebody was faster.

use std::time::Instant;

use futures_util::future::{BoxFuture, FutureExt};
use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use stasis_pool_api::{SandboxId, Timestamp};
use stasis_state::{Change, Notice, Page, Query, Record, Store, StoreError};
use tokio::sync::broadcast;

const OPERATION_SECONDS: &str = "stasis_store_operation_seconds";
const UP: &str = "stasis_store_up";
const ERRORS: &str = "stasis_store_errors_total";
const CONFLICTS: &str = "stasis_store_conflicts_total";

pub(crate) fn describe() {
    describe_histogram!(OPERATION_SECONDS, Unit::Seconds, "Operations of the store of sandboxes' records, by kind.");
    describe_gauge!(UP, "1 if the store could do what it was last asked for, 0 if it could not be used.");
    describe_counter!(ERRORS, "Operations of the store that it could not do, by kind.");
    describe_counter!(CONFLICTS, "Changes that were refused because the record had changed meanwhile.");
}

/// A store whose operations are measured.
pub(crate) struct Measured<S>(pub(crate) S);

fn measured<'a, T: 'a>(
    operation: &'static str,
    work: BoxFuture<'a, Result<T, StoreError>>,
) -> BoxFuture<'a, Result<T, StoreError>> {
    let begun = Instant::now();
    work.inspect(move |done| {
        histogram!(OPERATION_SECONDS, "operation" => operation).record(begun.elapsed().as_secs_f64());
        let is_up = !matches!(done, Err(StoreError::Unavailable { .. }));
        gauge!(UP).set(f64::from(u8::from(is_up)));
        match done {
            Err(StoreError::Conflict { .. }) => counter!(CONFLICTS).increment(1),
            Err(StoreError::Unavailable { .. } | StoreError::Corrupt { .. }) => {
                counter!(ERRORS, "operation" => operation).increment(1);
            }
            _ => {}
        }
    })
    .boxed()
}

impl<S: Store> Store for Measured<S> {
    fn create(&self, record: Record) -> BoxFuture<'_, Result<(), StoreError>> {
        measured("create", self.0.create(record))
    }
    fn get<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, Result<Record, StoreError>> {
        measured("get", self.0.get(id))
    }
    fn list(&self, query: Query) -> BoxFuture<'_, Result<Page, StoreError>> {
        measured("list", self.0.list(query))
    }
    fn commit(&self, change: Change) -> BoxFuture<'_, Result<Record, StoreError>> {
        measured("commit", self.0.commit(change))
    }
    fn discard<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
        measured("discard", self.0.discard(id))
    }
    fn due(&self, by: Timestamp, limit: usize) -> BoxFuture<'_, Result<Page, StoreError>> {
        measured("due", self.0.due(by, limit))
    }
    fn next_due(&self) -> BoxFuture<'_, Result<Option<Timestamp>, StoreError>> {
        measured("next_due", self.0.next_due())
    }
    fn notices(&self) -> broadcast::Receiver<Notice> {
        self.0.notices()
    }
}
