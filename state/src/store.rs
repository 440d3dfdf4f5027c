//! Where records are kept.

use futures_util::future::BoxFuture;
use tokio::sync::broadcast;

use crate::{Change, Process, Record, SandboxId, Stamp, State, Template, Tenant, Timestamp};

/// Why a store did not do it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// The record is not what the change expected: somebody was faster.
    #[error("sandbox {id} has changed meanwhile: it is {present}; read it and decide again")]
    Conflict {
        /// Which.
        id: SandboxId,
        /// What it is now.
        present: Stamp,
    },
    /// There is no such record (any more).
    #[error("there is no sandbox {id}")]
    NotFound {
        /// Which.
        id: SandboxId,
    },
    /// There is one of this name already.
    #[error("there is a sandbox {id} already: choose another name")]
    Exists {
        /// Which.
        id: SandboxId,
    },
    /// The change would leave half a record: a mistake of the caller.
    #[error("sandbox {id} cannot become that: {missing}")]
    Incomplete {
        /// Which.
        id: SandboxId,
        /// What is missing.
        missing: &'static str,
    },
    /// The store cannot be written or read now: its disk is full or read-only, or it is closed. What was acknowledged is kept.
    #[error("the store cannot be used: {reason}; free its disk or look at its mount, and try again")]
    Unavailable {
        /// In the store's own words.
        reason: String,
    },
    /// What lies in the store is not a record.
    #[error("the record of sandbox {id} is damaged: {reason}; it can only be discarded")]
    Corrupt {
        /// Which, as far as that can be read.
        id: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// Which records, in the order of their ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Query {
    /// Only this tenant's.
    pub tenant: Option<Tenant>,
    /// Only those in one of these states; any if empty.
    pub states: Vec<State>,
    /// Only those behind this id: the last one of the page before.
    pub after: Option<SandboxId>,
    /// At most so many; 0 is taken as 1.
    pub limit: usize,
}

/// A record that cannot be read. It does not keep the others from being listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damaged {
    /// Its place in the store, by which it is discarded: its id, unless that is what is damaged.
    pub place: String,
    /// Its id: as it stands in the store, or, if that is none, in what can be read of the record.
    pub id: String,
    /// Whose it is: as it stands beside the record, or, if that is nobody, in what can be read of the record.
    pub tenant: String,
    /// What is wrong with it.
    pub reason: String,
    /// What it is made of, if that much can be read.
    pub template: Option<Template>,
    /// The VM that it names.
    pub process: Named,
}

/// The VM's process that a record names which cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named {
    /// This one.
    Process(Process),
    /// None: it has no VM.
    Nothing,
    /// Even that cannot be read: it may be any.
    Unknown,
}

/// Some records.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Page {
    /// Those that can be read.
    pub records: Vec<Record>,
    /// Those that cannot.
    pub damaged: Vec<Damaged>,
    /// There are more behind this id.
    pub next: Option<SandboxId>,
}

/// That a record has changed. A reader that has missed some lists again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// Which.
    pub id: SandboxId,
    /// What it became. [`State::Gone`]: it left the store.
    pub stamp: Stamp,
}

/// Where records are kept. What it has acknowledged, a crash of any process does not take back.
pub trait Store: Send + Sync + 'static {
    /// Adds a record.
    ///
    /// # Errors
    /// (in the future) [`StoreError::Exists`], [`StoreError::Unavailable`].
    fn create(&self, record: Record) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Reads one.
    ///
    /// # Errors
    /// (in the future) [`StoreError::NotFound`], [`StoreError::Corrupt`], [`StoreError::Unavailable`].
    fn get<'a>(&'a self, id: &'a SandboxId) -> BoxFuture<'a, Result<Record, StoreError>>;

    /// Reads some.
    ///
    /// # Errors
    /// (in the future) [`StoreError::Unavailable`].
    fn list(&self, query: Query) -> BoxFuture<'_, Result<Page, StoreError>>;

    /// Makes a change if the record is what it expects, all of it or nothing, and returns the record as it is now. One that has become
    /// [`State::Gone`] has left the store.
    ///
    /// # Errors
    /// (in the future) [`StoreError::Conflict`], [`StoreError::NotFound`], [`StoreError::Incomplete`], [`StoreError::Unavailable`],
    /// [`StoreError::Corrupt`].
    fn commit(&self, change: Change) -> BoxFuture<'_, Result<Record, StoreError>>;

    /// Removes a record that cannot be read; whether it was there. One that can be read is killed instead.
    ///
    /// # Errors
    /// (in the future) [`StoreError::Conflict`] if it can be read, [`StoreError::Unavailable`].
    fn discard<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<bool, StoreError>>;

    /// The records for which something is due ([`Record::due`]) by then, the earliest first, from an index.
    ///
    /// # Errors
    /// (in the future) [`StoreError::Unavailable`].
    fn due(&self, by: Timestamp, limit: usize) -> BoxFuture<'_, Result<Page, StoreError>>;

    /// When the next thing is due: until then, or until a notice, whoever waits for [`Store::due`] may sleep.
    ///
    /// # Errors
    /// (in the future) [`StoreError::Unavailable`].
    fn next_due(&self) -> BoxFuture<'_, Result<Option<Timestamp>, StoreError>>;

    /// Tells of every change from now on, in order, after it was made.
    fn notices(&self) -> broadcast::Receiver<Notice>;
}

/// Notices that a slow reader may be behind before it has to list again.
pub(crate) const NOTICES: usize = 1024;
