//! How fast a store is, for `stasis bench`.

use std::time::{Duration, Instant};

use futures_util::future::try_join_all;

use crate::{
    Facts, Lifetime, Metadata, New, OnTimeout, Record, SandboxId, Store, StoreError, Template, Timestamp,
    name::NameError,
};

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The store failed.
    #[error("the store failed while it was measured")]
    Store(#[from] StoreError),
    /// A name that this module makes is not one: a mistake in it.
    #[error("a name for measuring is not valid")]
    Name(#[from] NameError),
}

/// `store.cas_per_s`: acknowledged changes per second while `writers` callers, each with a record of its own, change theirs one after
/// another for `time`. Whatever it adds, it removes.
///
/// # Errors
/// [`BenchError`].
pub async fn cas_per_s(store: &dyn Store, writers: usize, time: Duration) -> Result<f64, BenchError> {
    let records = (0..writers).map(record).collect::<Result<Vec<_>, _>>()?;
    try_join_all(records.iter().map(|record| store.create(record.clone()))).await?;
    let started = Instant::now();
    let written = try_join_all(records.into_iter().map(|mut record| async move {
        let mut count = 0_u32;
        while started.elapsed() < time {
            record = store.commit(record.edit(Timestamp::now())).await?;
            count += 1;
        }
        Ok::<_, StoreError>((count, record))
    }))
    .await?;
    let took = started.elapsed().as_secs_f64();
    let count: u32 = written.iter().map(|(count, _)| count).sum();
    try_join_all(written.into_iter().map(|(_, record)| remove(store, record))).await?;
    Ok(f64::from(count) / took)
}

async fn remove(store: &dyn Store, record: Record) -> Result<(), StoreError> {
    for event in [crate::Event::Kill, crate::Event::Removed] {
        let present = store.get(record.id()).await?;
        let Ok(change) = present.on(event, Timestamp::now()) else { return Ok(()) };
        store.commit(change).await?;
    }
    Ok(())
}

fn record(number: usize) -> Result<Record, NameError> {
    let lifetime = Lifetime {
        timeout: Some(Duration::from_secs(300)),
        on_timeout: OnTimeout::Pause,
        auto_resume: true,
        pause_after: None,
        hibernate_after: None,
    };
    let new = New {
        id: format!("bench-{}-{number}", std::process::id()).parse::<SandboxId>()?,
        tenant: "bench".parse()?,
        template: Template { name: "bench".parse()?, version: "1".parse()? },
        facts: Facts::new(lifetime, Metadata::default()),
    };
    Ok(Record::new(new, Timestamp::now()))
}
