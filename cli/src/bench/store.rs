//! `stasis bench store`: what a store of sandboxes' records can do on this disk.

use std::{path::PathBuf, time::Duration};

use anyhow::Context as _;
use stasis_loadtest::{Histogram, Row, Unit};
use stasis_state::{SqliteStore, bench::cas_per_s};

/// Callers that change a record each, and runs.
const WRITERS: [usize; 2] = [1, 64];
const RUNS: usize = 5;
const LENGTH: Duration = Duration::from_secs(1);

/// Where to measure, and where the figures go.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct StoreBench {
    /// Add the figures to this report, a JSON list; those of the same names are replaced
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// A folder on the disk to measure; what is made in it is removed
    #[arg(long, default_value = ".", value_name = "DIR")]
    dir: PathBuf,
}

pub(super) async fn measure(command: &StoreBench) -> anyhow::Result<Vec<Row>> {
    let folder = tempfile::tempdir_in(&command.dir).with_context(|| format!("the folder {}", command.dir.display()))?;
    let store = SqliteStore::open(&folder.path().join("records.sqlite"))?;
    let mut rows = Vec::new();
    for writers in WRITERS {
        let mut rates = Histogram::new(Unit::PerSecond);
        for _ in 0..RUNS {
            rates.record(cas_per_s(&store, writers, LENGTH).await?);
        }
        let name = if writers == 1 { "store.cas_per_s.1" } else { "store.cas_per_s" };
        let note = format!(
            "changes that SQLite has acknowledged, each on the disk, by {writers} callers that change a record each; {RUNS} runs of {LENGTH:?}"
        );
        rows.push(rates.row(name, note));
    }
    Ok(rows)
}
