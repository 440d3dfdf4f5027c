//! After a crash: what is done first, in each state, whether the VM's process lives or not.

use super::*;
use crate::{Owner, Record, Saved, record::tests::sample};

fn record(events: &[Event]) -> Record {
    events.iter().fold(sample("sb-1"), |record, event| {
        let mut change = record.on(*event, at(1)).unwrap();
        if *event == Event::Started {
            change.facts().owner = Some(Owner { node: "node".parse().unwrap(), process: None, lease_until: None });
        }
        if *event == Event::Hibernated {
            let name = |name: &str| -> crate::Name { name.parse().unwrap() };
            change.facts().saved = Some(Saved { memory: name("m"), machine: name("s"), disk: name("d") });
        }
        change.into_record()
    })
}

#[test]
fn nothing_that_lives_is_lost_and_nothing_that_is_lost_is_kept() {
    use Event as E;
    let (broke, kill) = (Some(Action::Write(E::Broke)), Some(Action::Write(E::Kill)));
    let go = Some(Action::Do(Work::Go));
    let restore = Some(Action::Do(Work::Restore));
    let (destroy, release) = (Some(Action::Do(Work::Destroy)), Some(Action::Do(Work::Release)));
    let suspended = [E::Started, E::PauseBegun, E::Paused];
    let and = |more: &[E]| record(&[&suspended[..], more].concat());
    let cases = [
        (record(&[]), kill, kill),
        (record(&[E::Started]), None, broke),
        (record(&[E::Started, E::PauseBegun]), go, broke),
        (and(&[]), None, broke),
        (and(&[E::HibernateBegun]), Some(Action::Do(Work::Save)), broke),
        (and(&[E::HibernateBegun, E::Hibernated]), release, None),
        (and(&[E::ResumeBegun]), go, broke),
        (and(&[E::HibernateBegun, E::Hibernated, E::ResumeBegun]), restore, restore),
        (record(&[E::Kill]), destroy, destroy),
        (record(&[E::Started, E::Broke]), release, None),
        (record(&[E::Broke]), kill, kill),
        (record(&[E::Kill, E::Removed]), None, None),
    ];
    for (record, lives, lost) in cases {
        for (alive, first) in [(true, lives), (false, lost)] {
            let (session, actions) = Session::adopt(&record, alive, limits(), at(2));
            assert_eq!(actions, Vec::from_iter(first), "{}, lives: {alive}", record.state());
            assert_eq!(session.status(at(2)).state, record.state());
        }
    }
}

#[test]
fn a_pause_that_a_crash_interrupted_is_called_off() {
    let (session, first) = Session::adopt(&record(&[Event::Started, Event::PauseBegun]), true, limits(), at(2));
    assert_eq!(first, [Action::Do(Work::Go)]);
    let mut told = Told { session, now: 2 };
    told.is(Input::Came(ONE), &[]).is(Input::Did, &[Action::Write(Event::StillRunning)]).written(&[Action::Admit(ONE)]);
}

#[test]
fn an_adopted_one_keeps_its_deadline_and_its_holds() {
    let mut change = record(&[Event::Started]).edit(at(5));
    change.facts().holds.set(Hold { name: "ci".parse().unwrap(), until: None }).unwrap();
    let (session, _) = Session::adopt(&change.into_record(), true, limits(), at(50));
    let status = session.status(at(50));
    assert_eq!(status.deadline, Some(at(300_001)));
    assert_eq!(status.idle.unwrap().held_by.len(), 1);
}
