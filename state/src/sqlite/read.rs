//! The reader's questions.

use rusqlite::{Connection, OptionalExtension as _, Row, ToSql, params_from_iter};

use super::{salvage, unavailable};
use crate::{
    Record, SandboxId, Tenant, Timestamp,
    store::{Damaged, Page, Query, StoreError},
};

/// What [`record`] reads, in this order.
const COLUMNS: &str = "id, tenant, state, generation, record";

/// A row as it lies there.
struct Raw {
    id: String,
    tenant: String,
    state: String,
    generation: i64,
    record: String,
}

fn raw(row: &Row<'_>) -> rusqlite::Result<Raw> {
    // A text that is no UTF-8 is the damage of one row, not a failure of the question.
    let text = |column| {
        let value = row.get_ref(column)?;
        let wrong = |error| rusqlite::Error::FromSqlConversionFailure(column, value.data_type(), Box::new(error));
        value.as_bytes().map(|bytes| String::from_utf8_lossy(bytes).into_owned()).map_err(wrong)
    };
    Ok(Raw { id: text(0)?, tenant: text(1)?, state: text(2)?, generation: row.get(3)?, record: text(4)? })
}

/// The record of a row, if the row is what a record makes of it.
fn record(raw: Raw) -> Result<Record, Box<Damaged>> {
    let damaged = |reason: String| {
        Box::new(Damaged {
            place: raw.id.clone(),
            id: salvage::or::<SandboxId>(&raw.id, &raw.record, "id"),
            tenant: salvage::or::<Tenant>(&raw.tenant, &raw.record, "tenant"),
            reason,
            template: salvage::template(&raw.record),
            process: salvage::process(&raw.record),
        })
    };
    let record = Record::decode(&raw.record).map_err(|error| {
        let source = std::error::Error::source(&error).map_or_else(String::new, |source| format!(": {source}"));
        damaged(format!("{error}{source}"))
    })?;
    let same = record.id().as_str() == raw.id
        && record.tenant().as_str() == raw.tenant
        && record.state().name() == raw.state
        && u64::try_from(raw.generation) == Ok(record.generation());
    if same { Ok(record) } else { Err(damaged("its columns and its record differ".to_owned())) }
}

pub(super) fn get(connection: &Connection, id: &SandboxId) -> Result<Record, StoreError> {
    let row = connection
        .prepare_cached(&format!("SELECT {COLUMNS} FROM sandbox WHERE id = ?"))
        .and_then(|mut select| select.query_row([id.as_str()], raw).optional())
        .map_err(|error| unavailable(&error))?
        .ok_or_else(|| StoreError::NotFound { id: id.clone() })?;
    record(row).map_err(|damaged| StoreError::Corrupt { id: damaged.id, reason: damaged.reason })
}

fn page(connection: &Connection, sql: &str, values: &[&dyn ToSql]) -> Result<Page, StoreError> {
    let rows = connection
        .prepare_cached(sql)
        .and_then(|mut select| select.query_map(params_from_iter(values), raw)?.collect::<Result<Vec<_>, _>>())
        .map_err(|error| unavailable(&error))?;
    let mut page = Page::default();
    for row in rows {
        match record(row) {
            Ok(record) => page.records.push(record),
            Err(damaged) => page.damaged.push(*damaged),
        }
    }
    Ok(page)
}

pub(super) fn list(connection: &Connection, query: &Query) -> Result<Page, StoreError> {
    let after = query.after.as_ref().map_or("", SandboxId::as_str);
    let tenant = query.tenant.as_ref().map(Tenant::as_str);
    let limit = query.limit.max(1);
    let most = i64::try_from(limit).unwrap_or(i64::MAX);
    let mut sql = format!("SELECT {COLUMNS} FROM sandbox WHERE id > ?");
    let mut values: Vec<&dyn ToSql> = vec![&after];
    if let Some(tenant) = &tenant {
        sql.push_str(" AND tenant = ?");
        values.push(tenant);
    }
    if !query.states.is_empty() {
        // Our own words, not a caller's.
        let names: Vec<_> = query.states.iter().map(|state| format!("'{state}'")).collect();
        sql.push_str(&format!(" AND state IN ({})", names.join(", ")));
    }
    sql.push_str(" ORDER BY id LIMIT ?");
    values.push(&most);
    let mut page = page(connection, &sql, &values)?;
    // A full page may be the last one: the next is then empty, and says so. A damaged row at the end is passed by its id too.
    let last = page.records.last().map(|record| record.id().clone());
    let last_damaged = page.damaged.last().and_then(|damaged| damaged.id.parse().ok());
    if page.records.len() + page.damaged.len() == limit {
        page.next = last.max(last_damaged);
    }
    Ok(page)
}

pub(super) fn due(connection: &Connection, by: Timestamp, limit: usize) -> Result<Page, StoreError> {
    let by = i64::try_from(by.as_ms()).unwrap_or(i64::MAX);
    let most = i64::try_from(limit).unwrap_or(i64::MAX);
    page(connection, &format!("SELECT {COLUMNS} FROM sandbox {DUE}"), &[&by, &most])
}

/// Served by the index `sandbox_by_due`.
pub(super) const DUE: &str = "WHERE due_at <= ? ORDER BY due_at, id LIMIT ?";

pub(super) fn next_due(connection: &Connection) -> Result<Option<Timestamp>, StoreError> {
    connection
        .prepare_cached("SELECT min(due_at) FROM sandbox WHERE due_at IS NOT NULL")
        .and_then(|mut select| select.query_row([], |row| row.get::<_, Option<i64>>(0)))
        .map(|at| at.and_then(|at| u64::try_from(at).ok()).map(Timestamp::from_ms))
        .map_err(|error| unavailable(&error))
}
