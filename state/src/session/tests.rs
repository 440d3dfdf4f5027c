mod adopting;
mod random;

use std::time::Duration;

use super::*;
use crate::{HeldBy, Hold, Lifetime, OnTimeout};

pub(super) fn limits() -> Limits {
    Limits {
        lifetime: Lifetime {
            timeout: Some(Duration::from_millis(10_000)),
            on_timeout: OnTimeout::Pause,
            auto_resume: true,
            pause_after: Some(Duration::from_millis(100)),
            hibernate_after: Some(Duration::from_millis(1_000)),
        },
        grace: Duration::from_millis(50),
        retry: Duration::from_millis(10),
    }
}

/// A session and its time, so that a test reads as what happens.
struct Told {
    session: Session,
    now: u64,
}

fn at(ms: u64) -> Timestamp {
    Timestamp::from_ms(ms)
}

const ONE: RequestId = RequestId(1);
const TWO: RequestId = RequestId(2);

impl Told {
    fn running(limits: Limits) -> Self {
        let mut session = Session::at(State::Running, limits, at(0));
        session.deadline = Some(at(10_000));
        Self { session, now: 0 }
    }

    fn suspended(limits: Limits) -> Self {
        Self { session: Session::at(State::Suspended, limits, at(0)), now: 0 }
    }

    #[track_caller]
    fn is(&mut self, input: Input, actions: &[Action]) -> &mut Self {
        assert_eq!(self.session.take(input, at(self.now)), actions);
        self
    }

    #[track_caller]
    fn written(&mut self, actions: &[Action]) -> &mut Self {
        self.is(Input::Written { deadline: Some(at(self.now + 10_000)) }, actions)
    }

    /// Lets the time pass until the session wants to be woken, which must be then.
    #[track_caller]
    fn wakes_at(&mut self, ms: u64, actions: &[Action]) -> &mut Self {
        assert_eq!(self.session.wake_at(at(self.now)), Some(at(ms)));
        self.now = ms;
        self.is(Input::Timer, actions)
    }
}

#[test]
fn an_idle_one_is_paused_and_a_request_brings_it_back_once() {
    let mut told = Told::running(limits());
    told.is(Input::Came(ONE), &[Action::Admit(ONE)]);
    told.now = 70;
    told.is(Input::Timer, &[]).is(Input::Over(ONE), &[]);
    told.wakes_at(170, &[Action::Write(Event::PauseBegun)]);
    told.written(&[Action::Do(Work::Stop)]).is(Input::Did, &[Action::Write(Event::Paused)]).written(&[]);
    told.is(Input::Came(ONE), &[Action::Write(Event::ResumeBegun)]).is(Input::Came(TWO), &[]);
    told.written(&[Action::Do(Work::Go)]).is(Input::Did, &[Action::Write(Event::Resumed)]);
    told.written(&[Action::Admit(ONE), Action::Admit(TWO)]);
}

#[test]
fn a_request_calls_a_pause_off_at_each_of_its_steps() {
    let mut told = Told::running(limits());
    told.wakes_at(100, &[Action::Write(Event::PauseBegun)]).is(Input::Came(ONE), &[]);
    told.written(&[Action::Write(Event::StillRunning)]).written(&[Action::Admit(ONE)]).is(Input::Over(ONE), &[]);

    told.wakes_at(200, &[Action::Write(Event::PauseBegun)]).written(&[Action::Do(Work::Stop)]);
    told.is(Input::Came(ONE), &[]).is(Input::Did, &[Action::Do(Work::Go)]);
    told.is(Input::Did, &[Action::Write(Event::StillRunning)]).written(&[Action::Admit(ONE)]).is(Input::Over(ONE), &[]);

    told.wakes_at(300, &[Action::Write(Event::PauseBegun)]).written(&[Action::Do(Work::Stop)]);
    told.is(Input::Did, &[Action::Write(Event::Paused)]).is(Input::Came(ONE), &[]);
    told.written(&[Action::Write(Event::ResumeBegun)]);
}

#[test]
fn a_hold_and_a_command_keep_it_awake_and_say_so() {
    let mut told = Told::running(limits());
    let name: crate::Name = "ci".parse().unwrap();
    told.is(Input::Hold(Hold { name: name.clone(), until: Some(at(500)) }), &[])
        .is(Input::Command(ONE), &[Action::Admit(ONE)]);
    let status = told.session.status(at(0));
    assert_eq!((status.requests, status.commands), (0, 1));
    let idle = status.idle.unwrap();
    assert_eq!((idle.idle_since, idle.will_pause_at), (None, None));
    assert_eq!(idle.held_by, [HeldBy::Commands(1), HeldBy::Hold { name: name.clone(), until: Some(at(500)) }]);
    told.is(Input::Over(ONE), &[]);
    assert_eq!(told.session.status(at(0)).idle.unwrap().will_pause_at, Some(at(500)));
    told.is(Input::Release(name), &[]);
    told.wakes_at(100, &[Action::Write(Event::PauseBegun)]);
}

#[test]
fn by_hand_it_is_paused_whatever_holds_it_and_requests_get_their_grace() {
    let mut told = Told::running(limits());
    told.is(Input::Command(ONE), &[Action::Admit(ONE)]);
    told.is(Input::Pause { grace: Duration::from_millis(30) }, &[]).is(Input::Came(TWO), &[]);
    told.wakes_at(30, &[Action::Cut(ONE, Refusal::Paused)]).is(Input::Over(ONE), &[Action::Write(Event::PauseBegun)]);
    told.written(&[Action::Do(Work::Stop)]).is(Input::Did, &[Action::Write(Event::Paused)]);
    // It was paused, as somebody wanted; then the request that waits resumes it.
    told.written(&[Action::Write(Event::ResumeBegun)]);
}

#[test]
fn its_time_is_over_when_the_deadline_says_so() {
    let mut kill = limits();
    kill.lifetime.on_timeout = OnTimeout::Kill;
    kill.lifetime.pause_after = None;
    let mut told = Told::running(kill);
    told.is(Input::Came(ONE), &[Action::Admit(ONE)]);
    told.wakes_at(10_000, &[Action::Cut(ONE, Refusal::Killed), Action::Write(Event::Kill)]);
    told.is(Input::Came(TWO), &[Action::Refuse(TWO, Refusal::Killed)]).written(&[Action::Do(Work::Destroy)]);
    told.is(Input::Did, &[Action::Write(Event::Removed)]).written(&[]);

    let mut pause = limits();
    pause.lifetime.pause_after = None;
    let mut told = Told::running(pause);
    told.is(Input::Came(ONE), &[Action::Admit(ONE)]);
    told.is(Input::Deadline(Some(at(700))), &[]).wakes_at(700, &[]).wakes_at(750, &[Action::Cut(ONE, Refusal::Paused)]);
    told.is(Input::Over(ONE), &[Action::Write(Event::PauseBegun)]);
}

#[test]
fn one_that_only_people_resume_refuses_requests() {
    let mut by_hand = limits();
    by_hand.lifetime.auto_resume = false;
    let mut told = Told::suspended(by_hand);
    told.is(Input::Came(ONE), &[Action::Refuse(ONE, Refusal::Paused)]);
    told.is(Input::Resume, &[Action::Write(Event::ResumeBegun)]).is(Input::Came(TWO), &[]);
    told.written(&[Action::Do(Work::Go)]).is(Input::Did, &[Action::Write(Event::Resumed)]);
    told.written(&[Action::Admit(TWO)]);
}

#[test]
fn it_hibernates_and_comes_back_from_disk() {
    let mut told = Told::suspended(limits());
    told.wakes_at(1_000, &[Action::Write(Event::HibernateBegun)]).written(&[Action::Do(Work::Save)]);
    told.is(Input::Did, &[Action::Write(Event::Hibernated)]).written(&[Action::Do(Work::Release)]);
    told.is(Input::Came(ONE), &[]).is(Input::Did, &[Action::Write(Event::ResumeBegun)]);
    told.written(&[Action::Do(Work::Restore)]);
    // There was no room, say: nothing is lost but this request's patience.
    let refused = Action::Refuse(ONE, Refusal::NotResumed);
    told.is(Input::DidNot, &[refused, Action::Write(Event::StillHibernated)]).written(&[]);
    told.is(Input::Came(TWO), &[Action::Write(Event::ResumeBegun)]).written(&[Action::Do(Work::Restore)]);
    told.is(Input::Did, &[Action::Write(Event::Resumed)]).written(&[Action::Admit(TWO)]);
}

#[test]
fn a_request_hurries_a_hibernation_and_calls_it_off() {
    let mut told = Told::suspended(limits());
    told.is(Input::Hibernate, &[Action::Write(Event::HibernateBegun)]).written(&[Action::Do(Work::Save)]);
    told.is(Input::Came(ONE), &[Action::Hurry]).is(Input::Did, &[Action::Write(Event::StillSuspended)]);
    told.written(&[Action::Write(Event::ResumeBegun)]);
}

#[test]
fn a_hibernation_that_was_called_off_does_not_come_with_the_next_pause() {
    let mut told = Told::suspended(limits());
    told.is(Input::Hibernate, &[Action::Write(Event::HibernateBegun)]).written(&[Action::Do(Work::Save)]);
    told.is(Input::Came(ONE), &[Action::Hurry]).is(Input::Did, &[Action::Write(Event::StillSuspended)]);
    told.written(&[Action::Write(Event::ResumeBegun)]).written(&[Action::Do(Work::Go)]);
    told.is(Input::Did, &[Action::Write(Event::Resumed)]).written(&[Action::Admit(ONE)]).is(Input::Over(ONE), &[]);
    // Memory is short, but it runs.
    told.is(Input::Hibernate, &[]).is(Input::Pause { grace: Duration::ZERO }, &[Action::Write(Event::PauseBegun)]);
    told.written(&[Action::Do(Work::Stop)]).is(Input::Did, &[Action::Write(Event::Paused)]).written(&[]);
}

#[test]
fn a_store_that_cannot_be_written_stops_what_is_new_and_keeps_what_runs() {
    let mut told = Told::running(limits());
    told.wakes_at(100, &[Action::Write(Event::PauseBegun)]).is(Input::NotWritten, &[]);
    told.is(Input::Came(ONE), &[Action::Admit(ONE)]).is(Input::Over(ONE), &[]);

    let mut told = Told::suspended(limits());
    told.is(Input::Came(ONE), &[Action::Write(Event::ResumeBegun)]);
    told.is(Input::NotWritten, &[Action::Refuse(ONE, Refusal::Store)]);
    told.is(Input::Came(TWO), &[Action::Write(Event::ResumeBegun)]).written(&[Action::Do(Work::Go)]);
    // It runs already: the record has to follow.
    told.is(Input::Did, &[Action::Write(Event::Resumed)]).is(Input::NotWritten, &[Action::Refuse(TWO, Refusal::Store)]);
    told.is(Input::Came(ONE), &[]).wakes_at(10, &[Action::Write(Event::Resumed)]).written(&[Action::Admit(ONE)]);
}

#[test]
fn a_pause_that_cannot_be_written_is_called_off() {
    let mut told = Told::running(limits());
    told.is(Input::Pause { grace: Duration::ZERO }, &[Action::Write(Event::PauseBegun)]).is(Input::Came(ONE), &[]);
    told.is(Input::NotWritten, &[Action::Admit(ONE)]).is(Input::Over(ONE), &[]);
    told.is(Input::Came(TWO), &[Action::Admit(TWO)]);
}

#[test]
fn a_deadline_whose_pause_cannot_be_written_is_tried_again_when_nobody_is_in() {
    let mut pause = limits();
    pause.lifetime.pause_after = None;
    let mut told = Told::running(pause);
    told.is(Input::Deadline(Some(at(700))), &[]).wakes_at(700, &[Action::Write(Event::PauseBegun)]);
    told.is(Input::Came(ONE), &[]).is(Input::NotWritten, &[Action::Admit(ONE)]);
    assert_eq!(told.session.wake_at(at(told.now)), None, "nobody is cut");
    // Given more time meanwhile, it is not paused before that is over.
    let mut longer = Told { session: told.session.clone(), now: told.now };
    longer.is(Input::Deadline(Some(at(900))), &[]).is(Input::Over(ONE), &[]);
    longer.wakes_at(900, &[Action::Write(Event::PauseBegun)]);
    told.is(Input::Over(ONE), &[]).wakes_at(710, &[Action::Write(Event::PauseBegun)]);
    told.written(&[Action::Do(Work::Stop)]);
}

#[test]
fn more_time_during_the_grace_calls_the_deadline_s_pause_off_and_nobody_else_s() {
    let mut pause = limits();
    pause.lifetime.pause_after = None;
    let grace = |by_hand: bool| {
        let mut told = Told::running(pause);
        told.is(Input::Came(ONE), &[Action::Admit(ONE)]).is(Input::Deadline(Some(at(700))), &[]).wakes_at(700, &[]);
        if by_hand {
            told.is(Input::Pause { grace: Duration::from_millis(50) }, &[]);
        }
        told.is(Input::Came(TWO), &[]);
        told
    };
    grace(false).is(Input::Deadline(Some(at(900))), &[Action::Admit(TWO)]);
    grace(false).is(Input::Deadline(Some(at(600))), &[]);
    grace(true).is(Input::Deadline(Some(at(900))), &[]).is(Input::Over(ONE), &[Action::Write(Event::PauseBegun)]);
}

#[test]
fn a_vm_that_ends_by_itself_is_a_failure_that_everyone_hears_of() {
    let mut told = Told::running(limits());
    told.is(Input::Came(ONE), &[Action::Admit(ONE)]).is(Input::Ended, &[Action::Write(Event::Broke)]);
    told.is(Input::Came(TWO), &[]).is(Input::Over(ONE), &[]);
    told.written(&[Action::Refuse(TWO, Refusal::Failed), Action::Do(Work::Release)]).is(Input::Did, &[]);
    told.is(Input::Came(ONE), &[Action::Refuse(ONE, Refusal::Failed)]);
    told.is(Input::Kill, &[Action::Write(Event::Kill)]);
}

#[test]
fn who_was_overtaken_by_a_kill_or_by_another_node_removes_what_it_has() {
    let mut told = Told::suspended(limits());
    told.is(Input::Came(ONE), &[Action::Write(Event::ResumeBegun)]);
    let refused = Action::Refuse(ONE, Refusal::Killed);
    told.is(Input::Superseded(State::Killing), &[refused, Action::Do(Work::Destroy)]);
    told.is(Input::Did, &[Action::Write(Event::Removed)]).written(&[]);

    let mut told = Told::suspended(limits());
    told.is(Input::Came(ONE), &[Action::Write(Event::ResumeBegun)]);
    let refused = Action::Refuse(ONE, Refusal::Moved);
    told.is(Input::Superseded(State::Running), &[refused, Action::Do(Work::Destroy)]);
    told.is(Input::Did, &[]).is(Input::Came(TWO), &[Action::Refuse(TWO, Refusal::Moved)]);
}
