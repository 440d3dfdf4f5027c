//! Pause against request, and kill against both.

use std::sync::atomic::AtomicUsize;

use shuttle::{
    sync::{Arc, atomic::Ordering::SeqCst},
    thread,
};
use stasis_state::{Input, Refusal, RequestId, State};

use crate::{
    check,
    model::{Heard, Node},
};

/// So many requests at once, while time passes.
fn requests(node: &Arc<Node>, count: u64) -> Vec<thread::JoinHandle<Heard>> {
    (1..=count)
        .map(|id| {
            let node = Arc::clone(node);
            thread::spawn(move || node.request(id))
        })
        .collect()
}

#[test]
fn no_request_is_lost_none_is_served_twice_and_no_vm_is_paused_under_one() {
    // How many schedules had a stop, and a VM that ran again behind it. Not part of the model, so they are std's.
    static PAUSED: AtomicUsize = AtomicUsize::new(0);
    static CALLED_OFF: AtomicUsize = AtomicUsize::new(0);
    // Few requests meet a pause that is well under way; many meet each other.
    for count in [1, 3] {
        check(move || {
            let node = Node::new(false);
            let all = requests(&node, count);
            let timer = {
                let node = Arc::clone(&node);
                thread::spawn(move || (0..3).for_each(|_| node.time_passes()))
            };
            for request in all {
                assert_eq!(request.join().unwrap(), Heard::Admitted);
            }
            timer.join().unwrap();
            let mut executed = node.executed.lock().unwrap().clone();
            executed.sort_unstable();
            let each_once: Vec<_> = (1..=count).map(RequestId).collect();
            assert_eq!(executed, each_once);
            assert_eq!(node.stored(), Some(node.state()), "the store and the session disagree");
            PAUSED.fetch_add(usize::from(node.stops.load(SeqCst) > 0), SeqCst);
            CALLED_OFF.fetch_add(usize::from(node.gos.load(SeqCst) > 0), SeqCst);
        });
    }
    let tried = (PAUSED.load(SeqCst), CALLED_OFF.load(SeqCst));
    println!("schedules with a stop, and with a stop that a request undid: {tried:?}");
    assert!(tried.0 > 0 && tried.1 > 0, "the race was not tried: {tried:?}");
}

#[test]
fn many_requests_to_a_suspended_one_resume_it_once() {
    check(|| {
        let node = Node::new(true);
        for request in requests(&node, 4) {
            assert_eq!(request.join().unwrap(), Heard::Admitted);
        }
        assert_eq!(node.gos.load(SeqCst), 1);
        assert_eq!(node.stored(), Some(State::Running));
    });
}

#[test]
fn a_kill_from_outside_ends_all_and_everybody_is_answered() {
    check(|| {
        let node = Node::new(true);
        let all = requests(&node, 2);
        let others: [fn(&Node); 2] = [Node::kill_from_outside, |node| {
            node.time_passes();
            node.give(Input::Pause { grace: std::time::Duration::ZERO });
        }];
        let others = others.map(|other| {
            let node = Arc::clone(&node);
            thread::spawn(move || other(&node))
        });
        for request in all {
            let heard = request.join().unwrap();
            let expected = [
                Heard::Admitted,
                Heard::Refused(Refusal::Killed),
                // It is gone already: whose it was, nobody knows.
                Heard::Refused(Refusal::Moved),
            ];
            assert!(expected.contains(&heard), "{heard:?}");
        }
        for other in others {
            other.join().unwrap();
        }
        assert_eq!((node.state(), node.stored()), (State::Gone, None));
    });
}
