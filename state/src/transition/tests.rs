use proptest::prelude::*;

use super::*;
use crate::{Record, Timestamp, record::tests::sample};

/// The table once more, as a drawing: rows are states, columns events, in the order of `ALL`.
const DRAWN: &[&str] = &[
    //  sta pbe str pau hbe hib sts rbe res sth bro kil rem
    "running - - - - - - - - - failed killing -",
    "- pausing - - - - - - - - failed killing -",
    "- - running suspended - - - - - - failed killing -",
    "- - - - hibernating - - resuming - - failed killing -",
    "- - - - - hibernated suspended - - - failed killing -",
    "- - - - - - - resuming - - failed killing -",
    "- - - - - - suspended - running hibernated failed killing -",
    "- - - - - - - - - - - killing gone",
    "- - - - - - - - - - - - -",
    "- - - - - - - - - - - killing -",
];

#[test]
fn every_state_and_event_is_as_drawn() {
    assert_eq!(DRAWN.len(), State::ALL.len());
    for (state, row) in State::ALL.iter().zip(DRAWN) {
        let row: Vec<_> = row.split(' ').collect();
        assert_eq!(row.len(), Event::ALL.len());
        for (event, drawn) in Event::ALL.iter().zip(row) {
            let found = next(*state, *event).map_or("-", State::name);
            assert_eq!(found, drawn, "{state} + {event}");
        }
    }
}

#[test]
fn an_illegal_event_names_the_state_and_what_would_be_allowed() {
    let refused = next(State::Running, Event::Resumed).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "a sandbox that is running cannot take the event resumed; it could take: pause-begun, broke, kill"
    );
    assert!(next(State::Gone, Event::Kill).unwrap_err().to_string().ends_with("nothing, it is gone"));
}

#[test]
fn delete_succeeds_from_every_state() {
    for state in State::ALL.iter().filter(|state| **state != State::Gone) {
        assert_eq!(next(*state, Event::Kill), Ok(State::Killing), "{state}");
    }
    assert_eq!(next(State::Killing, Event::Removed), Ok(State::Gone));
}

#[test]
fn every_state_is_reachable_and_every_event_leads_somewhere() {
    let mut reached = vec![State::Creating];
    let mut at = 0;
    while let Some(state) = reached.get(at).copied() {
        at += 1;
        for event in allowed_in(state) {
            let to = next(state, event).unwrap();
            if !reached.contains(&to) {
                reached.push(to);
            }
        }
    }
    assert_eq!(reached.len(), State::ALL.len());
    for event in Event::ALL {
        assert!(State::ALL.iter().any(|state| next(*state, *event).is_ok()), "{event}");
    }
}

proptest! {
    #[test]
    fn no_sequence_leaves_the_table_and_generations_only_rise(
        events in prop::collection::vec(prop::sample::select(Event::ALL), 0..60)
    ) {
        let mut record: Record = sample("sb-1");
        let mut now = 1_000;
        for event in events {
            now += 10;
            let before = record.stamp();
            match record.on(event, Timestamp::from_ms(now)) {
                Ok(change) => {
                    prop_assert_eq!(change.expected(), before);
                    record = change.into_record();
                    prop_assert_eq!(next(before.state, event), Ok(record.state()));
                    prop_assert!(record.generation() > before.generation);
                }
                Err(refused) => {
                    prop_assert_eq!(refused.state, before.state);
                    prop_assert!(next(before.state, event).is_err());
                    prop_assert_eq!(record.stamp(), before);
                }
            }
        }
    }
}
