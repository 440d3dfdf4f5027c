//! Opening the file: how it is used, and which form it has.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use rusqlite::{Connection, TransactionBehavior};

/// Marks a file as a Stasis store (`PRAGMA application_id`): "Stas".
const APPLICATION: i32 = 0x5374_6173;

/// One step per version of the schema, never changed afterwards; `PRAGMA user_version` counts those that were taken.
///
/// The columns beside `record` are copies for indexes and for the compare-and-set; a row in which they differ is damaged.
const MIGRATIONS: &[&str] = &["
    CREATE TABLE sandbox (
        id TEXT NOT NULL PRIMARY KEY,
        tenant TEXT NOT NULL,
        state TEXT NOT NULL,
        generation INTEGER NOT NULL,
        due_at INTEGER,
        record TEXT NOT NULL
    ) STRICT;
    CREATE INDEX sandbox_by_tenant ON sandbox (tenant, id);
    CREATE INDEX sandbox_by_due ON sandbox (due_at, id) WHERE due_at IS NOT NULL;
"];

/// How long a connection waits for another process that writes, say a person with `sqlite3`.
const BUSY: Duration = Duration::from_secs(5);

/// Why a store was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file cannot be opened, read or written.
    #[error("the store {file} cannot be used: look at its folder, its permissions and its disk", file = file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// In SQLite's words.
        #[source]
        source: rusqlite::Error,
    },
    /// It is a database, and not ours.
    #[error("{file} is a database of something else: give Stasis a folder of its own", file = file.display())]
    Foreign {
        /// The file.
        file: PathBuf,
    },
    /// A newer build has written it.
    #[error(
        "the store {file} has schema {found}, and this build knows up to {known}: use the newer build",
        file = file.display(), known = MIGRATIONS.len()
    )]
    Newer {
        /// The file.
        file: PathBuf,
        /// Its schema.
        found: i64,
    },
    /// Its file system does not allow the write-ahead log, which needs shared memory.
    #[error("the store {file} cannot have a write-ahead log: put it on a local disk", file = file.display())]
    NoLog {
        /// The file.
        file: PathBuf,
    },
    /// No thread could be started.
    #[error("the store's threads could not be started")]
    Thread {
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A connection, set up.
pub(super) fn connect(file: &Path) -> Result<Connection, OpenError> {
    let failed = |source| OpenError::File { file: file.to_owned(), source };
    let connection = Connection::open(file).map_err(failed)?;
    connection.busy_timeout(BUSY).map_err(failed)?;
    let mode: String = connection.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0)).map_err(failed)?;
    if mode != "wal" {
        return Err(OpenError::NoLog { file: file.to_owned() });
    }
    connection.execute_batch("PRAGMA synchronous = FULL; PRAGMA temp_store = MEMORY").map_err(failed)?;
    Ok(connection)
}

/// Brings the schema up to date, all of it or nothing.
pub(super) fn migrate(file: &Path, connection: &mut Connection) -> Result<(), OpenError> {
    let failed = |source| OpenError::File { file: file.to_owned(), source };
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    let number = |sql: &str| transaction.query_row(sql, [], |row| row.get::<_, i64>(0)).map_err(failed);
    let found = number("PRAGMA user_version")?;
    let empty = number("SELECT count(*) FROM sqlite_master")? == 0;
    if !empty && number("PRAGMA application_id")? != i64::from(APPLICATION) {
        return Err(OpenError::Foreign { file: file.to_owned() });
    }
    let taken = usize::try_from(found)
        .ok()
        .filter(|taken| *taken <= MIGRATIONS.len())
        .ok_or_else(|| OpenError::Newer { file: file.to_owned(), found })?;
    for step in MIGRATIONS.iter().skip(taken) {
        transaction.execute_batch(step).map_err(failed)?;
    }
    if taken < MIGRATIONS.len() {
        let marks = format!("PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {}", MIGRATIONS.len());
        transaction.execute_batch(&marks).map_err(failed)?;
    }
    transaction.commit().map_err(failed)
}
