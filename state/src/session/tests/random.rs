//! Any order of inputs, with a store and a VM that may fail: what must hold whatever happens.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::transition;

#[derive(Debug, Clone, Copy)]
enum Step {
    Came,
    Over(usize),
    /// The outstanding action succeeds.
    Works,
    /// It fails.
    Fails,
    Other(usize),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => Just(Step::Came),
        4 => (0..8_usize).prop_map(Step::Over),
        10 => Just(Step::Works),
        1 => Just(Step::Fails),
        2 => (0..5_usize).prop_map(Step::Other),
        4 => (0..1_500_u64).prop_map(Step::Wait),
    ]
}

/// What the session is told about, and what must be so.
struct World {
    session: Session,
    now: u64,
    state: State,
    /// The vCPUs run.
    runs: bool,
    outstanding: Option<Action>,
    /// Every request that came: none before it is answered.
    answers: BTreeMap<RequestId, Option<Action>>,
    inside: Vec<RequestId>,
}

impl World {
    fn take(&mut self, input: Input) {
        for action in self.session.take(input, at(self.now)) {
            match action {
                Action::Admit(id) => {
                    assert!(self.runs, "{id:?} was let into a VM that does not run");
                    assert_eq!(self.state, State::Running);
                    assert_eq!(self.answers.insert(id, Some(action)), Some(None), "{id:?} was answered twice");
                    self.inside.push(id);
                }
                Action::Refuse(id, _) => {
                    assert_eq!(self.answers.insert(id, Some(action)), Some(None), "{id:?} was answered twice");
                }
                Action::Cut(id, _) => assert!(self.inside.contains(&id)),
                Action::Hurry => assert_eq!(self.outstanding, Some(Action::Do(Work::Save))),
                Action::Write(event) => {
                    assert_eq!(self.outstanding.replace(action), None, "two at once");
                    assert!(transition::next(self.state, event).is_ok(), "{} cannot take {event}", self.state);
                }
                Action::Do(work) => {
                    assert_eq!(self.outstanding.replace(action), None, "two at once");
                    if work == Work::Stop {
                        assert_eq!(self.inside, [], "paused under a request");
                    }
                }
            }
        }
    }

    fn outcome(&mut self, works: bool) {
        match self.outstanding.take() {
            Some(Action::Write(event)) if works => {
                self.state = transition::next(self.state, event).unwrap();
                let deadline = (self.state == State::Running).then(|| at(self.now + 3_000));
                self.take(Input::Written { deadline });
            }
            Some(Action::Write(_)) => self.take(Input::NotWritten),
            Some(Action::Do(work)) => {
                match work {
                    _ if !works => {}
                    Work::Create | Work::Go | Work::Restore => self.runs = true,
                    Work::Stop | Work::Destroy | Work::Release => self.runs = false,
                    Work::Save => {}
                }
                self.take(if works { Input::Did } else { Input::DidNot });
            }
            _ => {}
        }
    }

    fn over(&mut self, id: RequestId) {
        self.inside.retain(|inside| *inside != id);
        self.take(Input::Over(id));
        // One that has left while it waited needs no answer.
        if self.answers[&id].is_none() {
            self.answers.remove(&id);
        }
    }

    fn other(&mut self, which: usize) {
        match which {
            0 => self.take(Input::Pause { grace: Duration::from_millis(20) }),
            1 => self.take(Input::Resume),
            2 => self.take(Input::Hibernate),
            3 if self.now.is_multiple_of(5) => self.take(Input::Kill),
            4 if self.now.is_multiple_of(5) && self.state == State::Running && self.runs => {
                self.runs = false;
                self.take(Input::Ended);
            }
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, ..ProptestConfig::default() })]
    #[test]
    fn nobody_is_lost_served_twice_or_paused(steps in prop::collection::vec(step(), 1..120), auto_resume: bool) {
        let mut limits = limits();
        limits.lifetime.auto_resume = auto_resume;
        let (session, first) = Session::create(limits, at(0));
        prop_assert_eq!(&first, &[Action::Do(Work::Create)]);
        let mut world = World {
            session,
            now: 0,
            state: State::Creating,
            runs: false,
            outstanding: first.first().copied(),
            answers: BTreeMap::new(),
            inside: Vec::new(),
        };
        let mut next = 0;
        for step in steps {
            match step {
                Step::Came => {
                    next += 1;
                    world.answers.insert(RequestId(next), None);
                    let came = if next.is_multiple_of(3) { Input::Command } else { Input::Came };
                    world.take(came(RequestId(next)));
                }
                Step::Over(which) => {
                    let left: Vec<_> = world.answers.iter().filter(|(id, answer)| {
                        answer.is_none() || world.inside.contains(id)
                    }).map(|(id, _)| *id).collect();
                    if let Some(id) = left.get(which % left.len().max(1)) {
                        world.over(*id);
                    }
                }
                Step::Works => world.outcome(true),
                Step::Fails => world.outcome(false),
                Step::Other(which) => world.other(which),
                Step::Wait(ms) => {
                    world.now += ms;
                    world.take(Input::Timer);
                }
            }
        }
        // From here on all goes well, and all requests end: everybody is answered within a few steps.
        for _ in 0..200 {
            for id in world.inside.clone() {
                world.over(id);
            }
            if world.outstanding.is_some() {
                world.outcome(true);
            } else if let Some(wake) = world.session.wake_at(at(world.now)) {
                world.now = world.now.max(wake.as_ms());
                world.take(Input::Timer);
            }
            if world.answers.values().all(Option::is_some) {
                break;
            }
        }
        let lost: Vec<_> = world.answers.iter().filter(|(_, answer)| answer.is_none()).collect();
        prop_assert!(lost.is_empty(), "never answered: {:?}", lost);
    }
}
