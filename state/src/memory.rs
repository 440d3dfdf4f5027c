//! Records in memory: for tests, and the core of the model checks. It keeps every promise of a store but that of outliving its process.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use futures_util::{FutureExt as _, future::BoxFuture};
use tokio::sync::broadcast;

use crate::{
    Change, Record, SandboxId, State, Timestamp,
    store::{NOTICES, Notice, Page, Query, Store, StoreError},
};

/// Records and what is due, without a lock.
#[derive(Debug, Default)]
pub struct Table {
    records: BTreeMap<SandboxId, Record>,
    due: BTreeSet<(Timestamp, SandboxId)>,
}

impl Table {
    /// See [`Store::create`].
    ///
    /// # Errors
    /// [`StoreError::Exists`].
    pub fn create(&mut self, record: Record) -> Result<(), StoreError> {
        if self.records.contains_key(record.id()) {
            return Err(StoreError::Exists { id: record.id().clone() });
        }
        self.put(record);
        Ok(())
    }

    /// See [`Store::get`].
    ///
    /// # Errors
    /// [`StoreError::NotFound`].
    pub fn get(&self, id: &SandboxId) -> Result<&Record, StoreError> {
        self.records.get(id).ok_or_else(|| StoreError::NotFound { id: id.clone() })
    }

    /// See [`Store::commit`].
    ///
    /// # Errors
    /// [`StoreError::Conflict`], [`StoreError::NotFound`], [`StoreError::Incomplete`].
    pub fn commit(&mut self, change: Change) -> Result<Record, StoreError> {
        change.check().map_err(|missing| StoreError::Incomplete { id: change.id().clone(), missing })?;
        let present = self.get(change.id())?;
        if present.stamp() != change.expected() {
            return Err(StoreError::Conflict { id: change.id().clone(), present: present.stamp() });
        }
        if let Some(due) = present.due() {
            self.due.remove(&(due.at, change.id().clone()));
        }
        let record = change.into_record();
        if record.state() == State::Gone {
            self.records.remove(record.id());
        } else {
            self.put(record.clone());
        }
        Ok(record)
    }

    fn put(&mut self, record: Record) {
        if let Some(due) = record.due() {
            self.due.insert((due.at, record.id().clone()));
        }
        self.records.insert(record.id().clone(), record);
    }

    fn list(&self, query: &Query) -> Page {
        let mut fitting = self.records.values().filter(|record| {
            query.after.as_ref().is_none_or(|after| record.id() > after)
                && query.tenant.as_ref().is_none_or(|tenant| record.tenant() == tenant)
                && (query.states.is_empty() || query.states.contains(&record.state()))
        });
        let records: Vec<_> = fitting.by_ref().take(query.limit.max(1)).cloned().collect();
        let next = fitting.next().and_then(|_| records.last()).map(|last| last.id().clone());
        Page { records, damaged: Vec::new(), next }
    }

    fn due(&self, by: Timestamp, limit: usize) -> Page {
        let ids = self.due.iter().take_while(|(at, _)| *at <= by).take(limit);
        Page { records: ids.filter_map(|(_, id)| self.records.get(id).cloned()).collect(), ..Page::default() }
    }
}

/// A [`Table`] that many may use.
#[derive(Debug)]
pub struct MemoryStore {
    table: Mutex<Table>,
    notices: broadcast::Sender<Notice>,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self { table: Mutex::default(), notices: broadcast::channel(NOTICES).0 }
    }
}

impl MemoryStore {
    fn table(&self) -> MutexGuard<'_, Table> {
        // A table is whole after each of its methods' steps that can panic: none can.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells, while the table is locked: notices come in the order of the changes.
    fn tell(&self, record: &Record) {
        // Nobody may be listening.
        let _ = self.notices.send(Notice { id: record.id().clone(), stamp: record.stamp() });
    }
}

impl Store for MemoryStore {
    fn create(&self, record: Record) -> BoxFuture<'_, Result<(), StoreError>> {
        async move {
            let mut table = self.table();
            table.create(record.clone())?;
            self.tell(&record);
            drop(table);
            Ok(())
        }
        .boxed()
    }

    fn get<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, Result<Record, StoreError>> {
        async move { self.table().get(id).cloned() }.boxed()
    }

    fn list(&self, query: Query) -> BoxFuture<'_, Result<Page, StoreError>> {
        async move { Ok(self.table().list(&query)) }.boxed()
    }

    fn commit(&self, change: Change) -> BoxFuture<'_, Result<Record, StoreError>> {
        async move {
            let mut table = self.table();
            let record = table.commit(change)?;
            self.tell(&record);
            drop(table);
            Ok(record)
        }
        .boxed()
    }

    fn discard<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<bool, StoreError>> {
        async move {
            let readable = id.parse().ok().and_then(|id: SandboxId| self.table().get(&id).cloned().ok());
            match readable {
                Some(record) => Err(StoreError::Conflict { id: record.id().clone(), present: record.stamp() }),
                None => Ok(false),
            }
        }
        .boxed()
    }

    fn due(&self, by: Timestamp, limit: usize) -> BoxFuture<'_, Result<Page, StoreError>> {
        async move { Ok(self.table().due(by, limit)) }.boxed()
    }

    fn next_due(&self) -> BoxFuture<'_, Result<Option<Timestamp>, StoreError>> {
        async move { Ok(self.table().due.first().map(|(at, _)| *at)) }.boxed()
    }

    fn notices(&self) -> broadcast::Receiver<Notice> {
        self.notices.subscribe()
    }
}
