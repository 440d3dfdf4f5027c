use std::{collections::BTreeMap, time::Duration};

use super::*;
use crate::{Due, Duty, Metadata, SandboxId};

pub(crate) fn sample(id: &str) -> Record {
    let lifetime = Lifetime {
        timeout: Some(Duration::from_secs(300)),
        on_timeout: OnTimeout::Pause,
        auto_resume: true,
        pause_after: Some(Duration::from_secs(30)),
        hibernate_after: Some(Duration::from_secs(600)),
    };
    let metadata = Metadata::try_from(BTreeMap::from([("a".to_owned(), "b c".to_owned())])).unwrap();
    let template = Template { name: "wordcount".parse().unwrap(), version: "v1".parse().unwrap() };
    let id: SandboxId = id.parse().unwrap();
    let new = New { id, tenant: "acme".parse().unwrap(), template, facts: Facts::new(lifetime, metadata) };
    Record::new(new, Timestamp::from_ms(1_000))
}

fn after(record: &Record, event: Event, at_ms: u64) -> Record {
    record.on(event, Timestamp::from_ms(at_ms)).unwrap().into_record()
}

#[test]
fn a_record_survives_its_own_form() {
    let mut change = sample("sb-1").on(Event::Started, Timestamp::from_ms(2_000)).unwrap();
    let facts = change.facts();
    facts.owner = Some(Owner {
        node: "node-a".parse().unwrap(),
        process: Some(Process { pid: 7, started: 99 }),
        lease_until: Some(Timestamp::from_ms(5)),
    });
    facts.holds.set(Hold { name: "ci".parse().unwrap(), until: Some(Timestamp::from_ms(9)) }).unwrap();
    let record = change.into_record();
    assert_eq!(Record::decode(&record.encode().unwrap()).unwrap(), record);
}

#[test]
fn unknown_fields_and_other_versions_are_refused() {
    let mut json = serde_json::to_value(sample("sb-1")).unwrap();
    json["colour"] = "blue".into();
    assert!(matches!(Record::decode(&json.to_string()), Err(DecodeError::Form(_))));
    json["version"] = 2.into();
    assert!(matches!(Record::decode(&json.to_string()), Err(DecodeError::Version { found: 2 })));
    let whole = sample("sb-1").encode().unwrap();
    assert!(matches!(Record::decode(&whole[..whole.len() - 1]), Err(DecodeError::Form(_))));
}

#[test]
fn paused_time_does_not_consume_the_timeout() {
    let running = after(&sample("sb-1"), Event::Started, 2_000);
    assert_eq!(running.ends_at(), Some(Timestamp::from_ms(302_000)));
    let pausing = after(&running, Event::PauseBegun, 100_000);
    let suspended = after(&pausing, Event::Paused, 102_000);
    assert_eq!(suspended.facts().deadline, Some(Deadline::Left(Duration::from_secs(200))));
    let resumed = after(&after(&suspended, Event::ResumeBegun, 900_000), Event::Resumed, 1_000_000);
    assert_eq!(resumed.ends_at(), Some(Timestamp::from_ms(1_200_000)));
}

#[test]
fn resumed_with_nothing_left_it_gets_its_time_anew() {
    let running = after(&sample("sb-1"), Event::Started, 0);
    let suspended = after(&after(&running, Event::PauseBegun, 300_000), Event::Paused, 300_001);
    let resumed = after(&after(&suspended, Event::ResumeBegun, 400_000), Event::Resumed, 400_000);
    assert_eq!(resumed.ends_at(), Some(Timestamp::from_ms(700_000)));
}

#[test]
fn what_is_due_follows_the_state() {
    let running = after(&sample("sb-1"), Event::Started, 0);
    let due = |at, duty| Some(Due { at: Timestamp::from_ms(at), duty });
    assert_eq!(running.due(), due(300_000, Duty::Timeout(OnTimeout::Pause)));
    let pausing = after(&running, Event::PauseBegun, 10_000);
    assert_eq!(pausing.due(), None);
    let suspended = after(&pausing, Event::Paused, 20_000);
    assert_eq!(suspended.due(), due(620_000, Duty::Hibernate));
    // An edit is no entry into the state.
    let edited = suspended.edit(Timestamp::from_ms(500_000)).into_record();
    assert_eq!((edited.due(), edited.generation()), (suspended.due(), suspended.generation() + 1));
    assert_eq!(after(&suspended, Event::Kill, 30_000).due(), None);
}

#[test]
fn metadata_and_holds_are_bounded() {
    let long = BTreeMap::from([("k".to_owned(), "x".repeat(16 << 10))]);
    assert!(Metadata::try_from(long).unwrap_err().to_string().contains("16385 bytes"));
    assert!(Metadata::try_from((0..65).map(|n| (n.to_string(), String::new())).collect::<BTreeMap<_, _>>()).is_err());
    let mut holds = Holds::default();
    for n in 0..32 {
        holds.set(Hold { name: format!("h{n}").parse().unwrap(), until: None }).unwrap();
    }
    assert_eq!(holds.set(Hold { name: "one-more".parse().unwrap(), until: None }), Err(HoldsError));
    let again = Hold { name: "h0".parse().unwrap(), until: Some(Timestamp::from_ms(5)) };
    assert_eq!(holds.set(again), Ok(()));
    assert_eq!(holds.active(Timestamp::from_ms(5)).count(), 31);
    assert!(holds.release(&"h1".parse().unwrap()));
    assert!(!holds.release(&"h1".parse().unwrap()));
}

#[test]
fn a_change_that_leaves_half_a_record_is_refused() {
    let suspended = after(&after(&after(&sample("sb-1"), Event::Started, 0), Event::PauseBegun, 1), Event::Paused, 2);
    let hibernating = after(&suspended, Event::HibernateBegun, 3);
    let mut change = hibernating.on(Event::Hibernated, Timestamp::from_ms(4)).unwrap();
    assert!(change.check().is_err());
    let name = || "x".parse().unwrap();
    change.facts().saved = Some(Saved { memory: name(), machine: name(), disk: name() });
    assert_eq!(change.check(), Ok(()));
    let mut broke = hibernating.on(Event::Broke, Timestamp::from_ms(4)).unwrap();
    assert!(broke.check().is_err());
    broke.facts().failure = Some("its process ended".into());
    assert_eq!(broke.check(), Ok(()));
}
