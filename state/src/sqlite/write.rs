//! The writer: whatever waits is written in one transaction, so that a sync serves many.

use std::sync::mpsc::Receiver;

use rusqlite::{Connection, OptionalExtension as _, TransactionBehavior, params};
use tokio::sync::{broadcast, oneshot};

use super::{read, unavailable};
use crate::{
    Change, Record, SandboxId, Stamp, State,
    store::{Notice, StoreError},
};

/// Most orders in one transaction: enough that the sync is shared by all callers of a busy node, few enough that the first of them does
/// not wait long for the last.
const MOST_AT_ONCE: usize = 64;

/// What to write. It is kept until it is answered, since it may have to be tried again.
#[derive(Debug)]
pub(super) enum Write {
    Create(Box<Record>),
    Commit(Box<Change>),
    Discard(String),
}

/// A write, and who waits for it.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) write: Write,
    pub(super) answer: oneshot::Sender<Result<Done, StoreError>>,
}

/// What was done.
#[derive(Debug, Default)]
pub(super) struct Done {
    /// There was something to do.
    pub(super) found: bool,
    notice: Option<Notice>,
}

/// Writes until there is nobody left who could give an order.
pub(super) fn run(connection: &mut Connection, orders: &Receiver<Order>, notices: &broadcast::Sender<Notice>) {
    while let Ok(first) = orders.recv() {
        let mut batch = vec![first];
        batch.extend(orders.try_iter().take(MOST_AT_ONCE - 1));
        match together(connection, &batch) {
            Ok(results) => {
                for (order, result) in batch.into_iter().zip(results) {
                    answer(order, result, notices);
                }
            }
            // Nothing of it was written. One order's failure (the one for which the disk had no room) is not the others'.
            Err(_) => {
                for order in batch {
                    let result = match together(connection, std::slice::from_ref(&order)) {
                        Ok(mut results) => results.pop().unwrap_or_else(|| Err(super::worker::ended())),
                        Err(error) => Err(unavailable(&error)),
                    };
                    answer(order, result, notices);
                }
            }
        }
    }
}

fn answer(order: Order, mut result: Result<Done, StoreError>, notices: &broadcast::Sender<Notice>) {
    if let Some(notice) = result.as_mut().ok().and_then(|done| done.notice.take()) {
        // Nobody may be listening.
        let _ = notices.send(notice);
    }
    // Whoever ordered may have left; it is written nevertheless.
    let _ = order.answer.send(result);
}

/// One transaction. Its outer error is the database's: nothing was written. The inner ones are each order's own.
fn together(connection: &mut Connection, orders: &[Order]) -> rusqlite::Result<Vec<Result<Done, StoreError>>> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let results = orders
        .iter()
        .map(|order| match &order.write {
            Write::Create(record) => create(&transaction, record),
            Write::Commit(change) => commit(&transaction, change),
            Write::Discard(id) => discard(&transaction, id),
        })
        .collect::<Result<_, _>>()?;
    transaction.commit()?;
    Ok(results)
}

/// What SQLite keeps as a signed number. Generations and times stay far below 2⁶³.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn told(record: &Record) -> Done {
    Done { found: true, notice: Some(Notice { id: record.id().clone(), stamp: record.stamp() }) }
}

fn due_at(record: &Record) -> Option<i64> {
    record.due().map(|due| signed(due.at.as_ms()))
}

fn encode(record: &Record) -> rusqlite::Result<String> {
    record.encode().map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
}

fn create(connection: &Connection, record: &Record) -> rusqlite::Result<Result<Done, StoreError>> {
    let mut insert = connection.prepare_cached(
        "INSERT INTO sandbox (id, tenant, state, generation, due_at, record) VALUES (?, ?, ?, ?, ?, ?)
         ON CONFLICT (id) DO NOTHING",
    )?;
    let id = record.id().as_str();
    let added = insert.execute(params![
        id,
        record.tenant().as_str(),
        record.state().name(),
        signed(record.generation()),
        due_at(record),
        encode(record)?
    ])?;
    Ok(if added == 1 { Ok(told(record)) } else { Err(StoreError::Exists { id: record.id().clone() }) })
}

fn commit(connection: &Connection, change: &Change) -> rusqlite::Result<Result<Done, StoreError>> {
    if let Err(missing) = change.check() {
        return Ok(Err(StoreError::Incomplete { id: change.id().clone(), missing }));
    }
    let (id, record, expected) = (change.id().as_str(), change.record(), change.expected());
    let changed = if record.state() == State::Gone {
        connection
            .prepare_cached("DELETE FROM sandbox WHERE id = ? AND state = ? AND generation = ?")?
            .execute(params![id, expected.state.name(), signed(expected.generation)])?
    } else {
        connection
            .prepare_cached(
                "UPDATE sandbox SET state = ?, generation = ?, due_at = ?, record = ?
                 WHERE id = ? AND state = ? AND generation = ?",
            )?
            .execute(params![
                record.state().name(),
                signed(record.generation()),
                due_at(record),
                encode(record)?,
                id,
                expected.state.name(),
                signed(expected.generation)
            ])?
    };
    if changed == 1 { Ok(Ok(told(record))) } else { Ok(Err(refused(connection, change.id())?)) }
}

/// Why no row was what a change expected.
fn refused(connection: &Connection, id: &SandboxId) -> rusqlite::Result<StoreError> {
    let present = connection
        .prepare_cached("SELECT state, generation FROM sandbox WHERE id = ?")?
        .query_row([id.as_str()], |row| Ok((row.get::<_, String>(0)?, row.get::<_, i64>(1)?)))
        .optional()?;
    Ok(match present {
        None => StoreError::NotFound { id: id.clone() },
        Some((state, generation)) => match (State::from_name(&state), u64::try_from(generation)) {
            (Some(state), Ok(generation)) => {
                StoreError::Conflict { id: id.clone(), present: Stamp { state, generation } }
            }
            _ => StoreError::Corrupt { id: id.to_string(), reason: format!("its state is {state:?}") },
        },
    })
}

fn discard(connection: &Connection, id: &str) -> rusqlite::Result<Result<Done, StoreError>> {
    if let Ok(known) = id.parse::<SandboxId>() {
        match read::get(connection, &known) {
            Ok(record) => return Ok(Err(StoreError::Conflict { id: known, present: record.stamp() })),
            Err(StoreError::Corrupt { .. }) => {}
            Err(StoreError::NotFound { .. }) => return Ok(Ok(Done::default())),
            Err(other) => return Ok(Err(other)),
        }
    }
    let removed = connection.execute("DELETE FROM sandbox WHERE id = ?", [id])?;
    Ok(Ok(Done { found: removed > 0, notice: None }))
}
