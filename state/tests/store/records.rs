//! Records to test with.

use std::time::Duration;

use stasis_state::{
    Event, Facts, Lifetime, Metadata, Name, New, OnTimeout, Record, Saved, State, Store, Template, Timestamp,
};

pub(crate) fn at(ms: u64) -> Timestamp {
    Timestamp::from_ms(ms)
}

pub(crate) fn record(id: &str, tenant: &str) -> Record {
    let lifetime = Lifetime {
        timeout: Some(Duration::from_secs(300)),
        on_timeout: OnTimeout::Pause,
        auto_resume: true,
        pause_after: Some(Duration::from_secs(30)),
        hibernate_after: Some(Duration::from_secs(600)),
    };
    let name = |name: &str| -> Name { name.parse().unwrap() };
    let new = New {
        id: id.parse().unwrap(),
        tenant: tenant.parse().unwrap(),
        template: Template { name: name("wordcount"), version: name("v1") },
        facts: Facts::new(lifetime, Metadata::default()),
    };
    Record::new(new, at(1_000))
}

/// One event, with what the state that it leads to needs.
pub(crate) async fn step(store: &dyn Store, record: &Record, event: Event, now: Timestamp) -> Record {
    let mut change = record.on(event, now).unwrap();
    match event {
        Event::Hibernated => {
            let name = |name: &str| -> Name { name.parse().unwrap() };
            change.facts().saved = Some(Saved { memory: name("memory"), machine: name("machine"), disk: name("disk") });
        }
        Event::Broke => change.facts().failure = Some("its process ended".to_owned()),
        _ => {}
    }
    store.commit(change).await.unwrap()
}

/// The events that lead to a state from the beginning.
pub(crate) fn way_to(state: State) -> Vec<Event> {
    use Event as E;
    let paused = vec![E::Started, E::PauseBegun, E::Paused];
    let with = |more: &[Event]| [paused.clone(), more.to_vec()].concat();
    match state {
        State::Creating => vec![],
        State::Running => vec![E::Started],
        State::Pausing => vec![E::Started, E::PauseBegun],
        State::Suspended => paused,
        State::Hibernating => with(&[E::HibernateBegun]),
        State::Hibernated => with(&[E::HibernateBegun, E::Hibernated]),
        State::Resuming => with(&[E::ResumeBegun]),
        State::Killing => vec![E::Kill],
        State::Gone => vec![E::Kill, E::Removed],
        State::Failed => vec![E::Broke],
    }
}

/// Makes a sandbox and brings it to a state.
pub(crate) async fn made(store: &dyn Store, id: &str, tenant: &str, state: State) -> Record {
    let mut record = record(id, tenant);
    store.create(record.clone()).await.unwrap();
    for event in way_to(state) {
        record = step(store, &record, event, at(2_000)).await;
    }
    assert_eq!(record.state(), state);
    record
}
