//! Claim against retire: who resumes a suspended sandbox, and who removes it for being unused, decide on the same record.

use std::{collections::BTreeMap, time::Duration};

use shuttle::{
    sync::{Arc, Mutex},
    thread,
};
use stasis_state::{
    Event, Facts, Lifetime, Metadata, New, OnTimeout, Record, SandboxId, State, StoreError, Table, Template, Timestamp,
};

use crate::check;

const NOW: Timestamp = Timestamp::from_ms(1);

/// A sandbox's record, run up to a state.
pub(crate) fn record(id: &str, events: &[Event]) -> Record {
    let lifetime = Lifetime {
        timeout: None,
        on_timeout: OnTimeout::Kill,
        auto_resume: true,
        pause_after: Some(Duration::from_millis(100)),
        hibernate_after: None,
    };
    let record = Record::new(
        New {
            id: id.parse().unwrap(),
            tenant: "acme".parse().unwrap(),
            template: Template { name: "t".parse().unwrap(), version: "1".parse().unwrap() },
            facts: Facts::new(lifetime, Metadata::default()),
        },
        NOW,
    );
    events.iter().fold(record, |record, event| record.on(*event, NOW).unwrap().into_record())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Claimed,
    Retired,
}

/// Takes a sandbox that is suspended, and tells by which event. Reading and writing are two steps: others come between.
fn take(table: &Mutex<Table>, id: &SandboxId, event: Event) -> bool {
    loop {
        let Ok(record) = table.lock().unwrap().get(id).cloned() else { return false };
        if record.state() != State::Suspended {
            return false;
        }
        let change = record.on(event, NOW).unwrap();
        let committed = table.lock().unwrap().commit(change);
        match committed {
            Ok(_) => return true,
            Err(StoreError::Conflict { .. }) => {}
            Err(StoreError::NotFound { .. }) => return false,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Writes down that one that is being killed is gone. Facts may still be written meanwhile.
fn remove(table: &Mutex<Table>, id: &SandboxId) {
    loop {
        let killing = table.lock().unwrap().get(id).cloned().unwrap();
        let committed = table.lock().unwrap().commit(killing.on(Event::Removed, NOW).unwrap());
        match committed {
            Ok(_) => return,
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_sandbox_is_claimed_once_or_retired_and_no_claim_is_lost() {
    check(|| {
        let ids: Arc<Vec<SandboxId>> = Arc::new(["a", "b", "c"].map(|id| id.parse().unwrap()).into());
        let table = Arc::new(Mutex::new(Table::default()));
        let fates = Arc::new(Mutex::new(BTreeMap::<SandboxId, Fate>::new()));
        for id in ids.iter() {
            let paused = record(id.as_str(), &[Event::Started, Event::PauseBegun, Event::Paused]);
            table.lock().unwrap().create(paused).unwrap();
        }
        let claims: Vec<_> = (0..3)
            .map(|_| {
                let (ids, table, fates) = (Arc::clone(&ids), Arc::clone(&table), Arc::clone(&fates));
                thread::spawn(move || {
                    let mine = ids.iter().find(|id| take(&table, id, Event::ResumeBegun))?;
                    let before = fates.lock().unwrap().insert(mine.clone(), Fate::Claimed);
                    assert_eq!(before, None, "{mine} is claimed, and was {before:?}");
                    Some(mine.clone())
                })
            })
            .collect();
        let retire = {
            let (ids, table, fates) = (Arc::clone(&ids), Arc::clone(&table), Arc::clone(&fates));
            thread::spawn(move || {
                // From the other end, and all but one.
                for id in ids.iter().skip(1).rev().filter(|id| take(&table, id, Event::Kill)) {
                    let before = fates.lock().unwrap().insert(id.clone(), Fate::Retired);
                    assert_eq!(before, None, "{id} is retired, and was {before:?}");
                    remove(&table, id);
                }
            })
        };
        // An owner that writes facts meanwhile costs nobody the sandbox.
        let edit = {
            let (ids, table) = (Arc::clone(&ids), Arc::clone(&table));
            thread::spawn(move || {
                for id in ids.iter() {
                    let record = table.lock().unwrap().get(id).cloned();
                    let Ok(record) = record else { continue };
                    let change = record.edit(NOW);
                    // Somebody was faster: that is what is tried here.
                    let _ = table.lock().unwrap().commit(change);
                }
            })
        };
        let claimed: Vec<_> = claims.into_iter().filter_map(|claim| claim.join().unwrap()).collect();
        retire.join().unwrap();
        edit.join().unwrap();
        let fates = fates.lock().unwrap();
        let retired = fates.values().filter(|fate| **fate == Fate::Retired).count();
        // Three claims, three sandboxes: a claim has gone without one only if that one was retired.
        assert_eq!(claimed.len() + retired, ids.len(), "{fates:?}");
        assert!(!claimed.is_empty(), "one is never retired");
    });
}
