use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, TcpListener},
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::mpsc,
    thread,
    time::Duration,
};

use stasis_guest_wire::wake::Step;

use super::*;
use crate::{
    gate::tests::{Fake, wake},
    page::{self, tests::Ring},
};

struct Agent {
    path: PathBuf,
    deaf: mpsc::Receiver<String>,
    _directory: tempfile::TempDir,
}

/// A server before `port`, on a thread that ends with the test's process.
fn agent(port: u16, effects: Fake) -> Agent {
    serving(port, effects, None)
}

fn serving(port: u16, effects: Fake, page: Option<Page>) -> Agent {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("agent");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let (tell, deaf) = mpsc::channel();
    let server = Server::new(listener, Gate::new(effects), Dialer::new(port).unwrap(), move |error| {
        let _ = tell.send(error.to_string());
    });
    let server = match page {
        Some(page) => server.with_page(page),
        None => server,
    };
    thread::spawn(move || server.run());
    Agent { path, deaf, _directory: directory }
}

impl Agent {
    fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.path).unwrap()
    }

    fn ask(&self, message: &FromNode) -> (UnixStream, FromAgent) {
        let mut stream = self.connect();
        frame::send(&mut stream, message).unwrap();
        let answer = frame::receive(&mut stream).unwrap();
        (stream, answer)
    }
}

/// A function that answers each connection with what it read, in upper case.
fn function() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || {
                let mut stream = stream.unwrap();
                let mut text = String::new();
                stream.read_to_string(&mut text).unwrap();
                stream.write_all(text.to_uppercase().as_bytes()).unwrap();
            });
        }
    });
    port
}

fn exchange(stream: &mut UnixStream, text: &str) -> String {
    stream.write_all(text.as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn nothing_passes_before_a_wake_and_all_does_after_it() {
    let agent = agent(function(), Fake::default());
    let (mut refused, answer) = agent.ask(&FromNode::Forward);
    assert!(matches!(answer, FromAgent::Refused { step: None, .. }));
    assert_eq!(refused.read(&mut [0; 8]).unwrap(), 0);
    let (mut woken, answer) = agent.ask(&FromNode::Wake(wake(1)));
    assert!(matches!(answer, FromAgent::Awake(_)));
    let (mut second, answer) = agent.ask(&FromNode::Forward);
    assert_eq!(answer, FromAgent::Forwarding);
    assert_eq!(exchange(&mut second, "second"), "SECOND");
    assert_eq!(exchange(&mut woken, "first"), "FIRST");
}

#[test]
fn a_broken_reseed_lets_nothing_through() {
    let agent = agent(function(), Fake { broken: Some(Step::Entropy), ..Fake::default() });
    let mut stream = agent.connect();
    frame::send(&mut stream, &FromNode::Wake(wake(1))).unwrap();
    stream.write_all(b"already sent").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let answer: FromAgent = frame::receive(&mut stream).unwrap();
    assert!(matches!(answer, FromAgent::Refused { step: Some(Step::Entropy), .. }));
    let mut rest = Vec::new();
    // The kernel may tell of the unread bytes with a reset; what counts is that nothing came back.
    let _ = stream.read_to_end(&mut rest);
    assert!(rest.is_empty());
    let (_, answer) = agent.ask(&FromNode::Forward);
    assert!(matches!(answer, FromAgent::Refused { .. }));
}

#[test]
fn garbage_is_answered_and_harms_nobody_else() {
    let agent = agent(function(), Fake::default());
    let mut stream = agent.connect();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let answer: FromAgent = frame::receive(&mut stream).unwrap();
    assert!(matches!(answer, FromAgent::Refused { step: None, .. }));
    let _silent = agent.connect();
    let (mut woken, _) = agent.ask(&FromNode::Wake(wake(1)));
    assert_eq!(exchange(&mut woken, "still"), "STILL");
}

#[test]
fn a_new_life_ends_the_connections_of_the_last() {
    let agent = agent(function(), Fake::default());
    let (mut old, _) = agent.ask(&FromNode::Wake(wake(1)));
    old.write_all(b"half").unwrap();
    let (mut new, answer) = agent.ask(&FromNode::Wake(wake(2)));
    assert!(matches!(answer, FromAgent::Awake(_)));
    assert_eq!(exchange(&mut new, "new"), "NEW");
    let mut rest = Vec::new();
    let _ = old.read_to_end(&mut rest);
    assert!(rest.is_empty());
}

#[test]
fn a_function_that_does_not_listen_gives_an_empty_stream() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let agent = agent(port, Fake::default());
    let (mut stream, answer) = agent.ask(&FromNode::Wake(wake(1)));
    assert!(matches!(answer, FromAgent::Awake(_)));
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    assert!(agent.deaf.recv().unwrap().contains("refused"));
}

/// A server that waits at a page, on a thread; the page, to be written as a VMM would.
fn parked(port: u16, effects: Fake) -> (Agent, &'static Page, mpsc::Receiver<Ring>) {
    let (page, rung) = page::tests::waiting();
    let seen: &'static Page = Box::leak(Box::new(page.again()));
    (serving(port, effects, Some(page)), seen, rung)
}

fn answered(page: &Page, rung: &mpsc::Receiver<Ring>) -> FromAgent {
    while rung.recv_timeout(Duration::from_secs(60)).expect("it rings") != Ring::Answered {}
    serde_json::from_str(&page::tests::seen(page).1).unwrap()
}

#[test]
fn an_order_on_the_page_opens_the_gate_without_a_connection() {
    let (agent, page, rung) = parked(function(), Fake::default());
    page::tests::put(page, &serde_json::to_string(&wake(1)).unwrap());
    assert!(matches!(answered(page, &rung), FromAgent::Awake(certificate) if certificate.generation == 1));
    let mut stream = agent.connect();
    frame::send(&mut stream, &FromNode::Pass).unwrap();
    assert_eq!(exchange(&mut stream, "at once"), "AT ONCE", "and not a word before it");
    let (_, again) = agent.ask(&FromNode::Wake(wake(1)));
    assert!(matches!(again, FromAgent::Refused { step: None, .. }), "it was obeyed once");
}

#[test]
fn an_order_on_the_page_that_fails_leaves_the_gate_shut() {
    for order in [serde_json::to_string(&wake(1)).unwrap(), "{}".into(), String::new()] {
        let broken = Fake { broken: Some(Step::Hostname), ..Fake::default() };
        let (agent, page, rung) = parked(function(), broken);
        page::tests::put(page, &order);
        assert!(matches!(answered(page, &rung), FromAgent::Refused { .. }));
        let mut stream = agent.connect();
        frame::send(&mut stream, &FromNode::Pass).unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty(), "who passes without a word is refused without one");
    }
}

#[test]
fn who_knocks_at_a_parked_agent_is_served() {
    let (agent, page, _rung) = parked(function(), Fake::default());
    let (mut woken, answer) = agent.ask(&FromNode::Wake(wake(1)));
    assert!(matches!(answer, FromAgent::Awake(_)));
    assert_eq!(exchange(&mut woken, "by the door"), "BY THE DOOR");
    assert_eq!(page::tests::seen(page).0, stasis_guest_wire::page::SHUT);
}
