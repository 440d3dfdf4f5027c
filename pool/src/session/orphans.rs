//! The VMs below a data folder that have no node now, as an operator sees them: `stasis down` names them, or ends them.

use std::{io, path::Path};

use stasis_state::{Process, Query, Record, SandboxId, SqliteStore, State, Store};

use super::kept::{VMS, end_at_once, living};
use crate::{node::RECORDS, vmm::Place};

/// Records read at a time.
const PAGE: usize = 500;

/// A VM that goes on without a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Orphan {
    /// Its process.
    pub pid: u32,
    /// The sandbox that it is of, and what that is; none where no record names it.
    pub sandbox: Option<(SandboxId, State)>,
}

fn places(data: &Path) -> io::Result<Vec<Place>> {
    let root = data.join(VMS);
    if root.exists() { Place::all(&root) } else { Ok(Vec::new()) }
}

/// Those that go on, and how many more there may be of which nothing can be read.
fn processes(data: &Path) -> io::Result<(Vec<Process>, usize)> {
    let (mut processes, mut unreadable) = (Vec::new(), 0);
    for place in places(data)? {
        match living(&place) {
            Ok(found) => processes.extend(found.map(|(holder, _)| holder.process)),
            Err(error) => {
                tracing::error!(%error, ?place, "a VM's papers cannot be read: it may go on, and is left as it is");
                unreadable += 1;
            }
        }
    }
    Ok((processes, unreadable))
}

/// How many VMs go on below a data folder.
///
/// # Errors
/// Where the folder cannot be read.
pub fn count_orphans(data: &Path) -> io::Result<usize> {
    processes(data).map(|(processes, unreadable)| processes.len() + unreadable)
}

/// The VMs that go on below a data folder, and whose they are.
///
/// # Errors
/// Where the folder cannot be read. Where the records cannot, the VMs are nobody's.
pub async fn orphans(data: &Path) -> io::Result<Vec<Orphan>> {
    let (processes, _) = processes(data)?;
    let records = if processes.is_empty() { Vec::new() } else { records(data).await };
    let whose = |process: Process| {
        let names_it =
            |record: &&Record| record.facts().owner.as_ref().and_then(|owner| owner.process) == Some(process);
        records.iter().find(names_it).map(|record| (record.id().clone(), record.state()))
    };
    Ok(processes.into_iter().map(|process| Orphan { pid: process.pid, sandbox: whose(process) }).collect())
}

async fn records(data: &Path) -> Vec<Record> {
    let store = match SqliteStore::open(&data.join(RECORDS)) {
        Ok(store) => store,
        Err(error) => {
            tracing::warn!(%error, "the records of sandboxes cannot be read");
            return Vec::new();
        }
    };
    let (mut records, mut after) = (Vec::new(), None);
    loop {
        match store.list(Query { after, limit: PAGE, ..Query::default() }).await {
            Ok(page) => {
                records.extend(page.records);
                after = page.next;
            }
            Err(error) => {
                tracing::warn!(%error, "the records of sandboxes cannot be read");
                return records;
            }
        }
        if after.is_none() {
            return records;
        }
    }
}

/// Ends the VMs that go on below a data folder, and waits for their end. How many there were. What is in their memory is lost.
///
/// # Errors
/// Where one cannot be ended.
pub fn end_orphans(data: &Path) -> io::Result<usize> {
    let (mut count, mut failure) = (0, None);
    for place in places(data)? {
        let ended = living(&place).and_then(|found| match found {
            Some((holder, handle)) => end_at_once(holder.process, &handle).map(|()| count += 1),
            None => Ok(()),
        });
        match ended {
            Ok(()) => place.remove(),
            // The others end all the same.
            Err(error) => drop(failure.get_or_insert(error)),
        }
    }
    failure.map_or(Ok(count), Err)
}
