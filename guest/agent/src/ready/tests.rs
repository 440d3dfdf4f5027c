use std::{net::TcpListener, sync::Arc, thread};

use super::*;

fn listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// Answers each connection with the next of `answers`, then stops listening.
fn serve(answers: &'static [&'static str]) -> u16 {
    let (listener, port) = listener();
    thread::spawn(move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    port
}

fn probe(port: u16, path: Option<&str>) -> Probe {
    Probe { port, path: path.map(str::to_owned) }
}

const SHORT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(20);

#[test]
fn an_open_port_suffices_without_a_path() {
    let (_listener, port) = listener();
    assert!(probe(port, None).wait(Instant::now(), LONG, &End::default()).is_ok());
    assert_eq!(probe(port, None).null_requests().len(), NULL_REQUESTS);
}

#[test]
fn answers_of_500_and_above_are_waited_out() {
    let port = serve(&["HTTP/1.1 503 Busy\r\n\r\n", "HTTP/1.1 500 No\r\n\r\n", "HTTP/1.0 404 Here\r\n\r\n"]);
    assert!(probe(port, Some("/x")).wait(Instant::now(), LONG, &End::default()).is_ok());
}

#[test]
fn a_path_that_is_never_ready_says_so() {
    let port = serve(&["HTTP/1.1 503 Busy\r\n\r\n"; 500]);
    let error = probe(port, Some("/x")).wait(Instant::now(), SHORT, &End::default()).unwrap_err();
    assert_eq!(error.to_string(), format!("GET /x on port {port} answered 503 until the deadline of 300ms"));
}

#[test]
fn what_does_not_speak_http_says_so() {
    let port = serve(&["SSH-2.0-OpenSSH_9.2 and more\r\n"; 500]);
    let error = probe(port, Some("/x")).wait(Instant::now(), SHORT, &End::default()).unwrap_err();
    assert_eq!(error.to_string(), format!("GET /x on port {port} got no HTTP answer within 300ms"));
}

#[test]
fn silence_ends_at_the_deadline() {
    let (listener, port) = listener();
    drop(listener);
    let error = probe(port, None).wait(Instant::now(), SHORT, &End::default()).unwrap_err();
    assert_eq!(error.to_string(), format!("nothing listened on port {port} within 300ms"));
}

#[test]
fn the_end_of_the_command_ends_the_wait() {
    let (listener, port) = listener();
    drop(listener);
    let end = Arc::new(End::default());
    let sets = Arc::clone(&end);
    let started = Instant::now();
    thread::spawn(move || sets.set(Exit::Status(3)));
    let error = probe(port, None).wait(started, LONG, &end).unwrap_err();
    assert!(started.elapsed() < LONG / 2);
    assert_eq!(error.to_string(), format!("the start command exited with status 3 before it listened on port {port}"));
}

#[test]
fn only_what_was_measured_is_reported() {
    let port = serve(&["HTTP/1.1 200 OK\r\n\r\nbody"; 3]);
    assert_eq!(probe(port, Some("/")).null_requests().len(), 3);
}
