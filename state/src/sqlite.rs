//! Records in one SQLite file: the store of a node that shares its sandboxes with no other.
//!
//! ```text
//!  commit, create ─▶ writer thread ─▶ one transaction for all that wait ─▶ synced ─▶ answers, then notices
//!  get, list, due ─▶ reader thread ─▶ a connection of its own; never waits for the writer (WAL)
//! ```
//!
//! An answer means that the write-ahead log was synced (`synchronous=FULL`), so neither a killed process nor a lost power takes it
//! back. Whoever drops the future of a write does not stop the write.

mod open;
mod read;
mod salvage;
mod worker;
mod write;

use std::path::Path;

use futures_util::{FutureExt as _, future::BoxFuture};
use rusqlite::Connection;
use tokio::sync::{broadcast, oneshot};

use self::{
    worker::Worker,
    write::{Done, Order, Write},
};
use crate::{
    Change, Record, SandboxId, Timestamp,
    store::{NOTICES, Notice, Page, Query, Store, StoreError},
};

pub use open::OpenError;

/// A question to the reader thread, which answers by itself.
type Question = Box<dyn FnOnce(&Connection) + Send>;

/// See the module.
#[derive(Debug)]
pub struct SqliteStore {
    writer: Worker<Order>,
    reader: Worker<Question>,
    notices: broadcast::Sender<Notice>,
}

impl SqliteStore {
    /// Opens the store in this file, makes it if there is none, and brings an older one up to date. Blocks.
    ///
    /// # Errors
    /// [`OpenError`] if it cannot be used, is of a newer build, or is not a store.
    pub fn open(file: &Path) -> Result<Self, OpenError> {
        let mut writing = open::connect(file)?;
        open::migrate(file, &mut writing)?;
        let reading = open::connect(file)?;
        let notices = broadcast::channel(NOTICES).0;
        let thread = |source| OpenError::Thread { source };
        let tell = notices.clone();
        Ok(Self {
            writer: Worker::start("store-write", move |orders| write::run(&mut writing, &orders, &tell))
                .map_err(thread)?,
            reader: Worker::start("store-read", move |questions| {
                questions.iter().for_each(|question: Question| question(&reading));
            })
            .map_err(thread)?,
            notices,
        })
    }

    async fn write(&self, write: Write) -> Result<Done, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.writer.give(Order { write, answer })?;
        answered.await.map_err(|_| worker::ended())?
    }

    async fn read<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&Connection) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.reader.give(Box::new(move |connection| {
            // Whoever asked may have left.
            let _ = answer.send(ask(connection));
        }))?;
        answered.await.map_err(|_| worker::ended())?
    }
}

impl Store for SqliteStore {
    fn create(&self, record: Record) -> BoxFuture<'_, Result<(), StoreError>> {
        async move { self.write(Write::Create(Box::new(record))).await.map(drop) }.boxed()
    }

    fn get<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, Result<Record, StoreError>> {
        let id = id.clone();
        async move { self.read(move |connection| read::get(connection, &id)).await }.boxed()
    }

    fn list(&self, query: Query) -> BoxFuture<'_, Result<Page, StoreError>> {
        async move { self.read(move |connection| read::list(connection, &query)).await }.boxed()
    }

    fn commit(&self, change: Change) -> BoxFuture<'_, Result<Record, StoreError>> {
        async move {
            let record = change.record().clone();
            self.write(Write::Commit(Box::new(change))).await.map(|_| record)
        }
        .boxed()
    }

    fn discard<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
        async move { self.write(Write::Discard(id.to_owned())).await.map(|done| done.found) }.boxed()
    }

    fn due(&self, by: Timestamp, limit: usize) -> BoxFuture<'_, Result<Page, StoreError>> {
        async move { self.read(move |connection| read::due(connection, by, limit)).await }.boxed()
    }

    fn next_due(&self) -> BoxFuture<'_, Result<Option<Timestamp>, StoreError>> {
        async move { self.read(read::next_due).await }.boxed()
    }

    fn notices(&self) -> broadcast::Receiver<Notice> {
        self.notices.subscribe()
    }
}

/// SQLite's error in the store's terms. What it says of disks ("database or disk is full", "attempt to write a readonly database") is
/// understood by people.
fn unavailable(error: &rusqlite::Error) -> StoreError {
    StoreError::Unavailable { reason: error.to_string() }
}

#[cfg(test)]
mod tests;
