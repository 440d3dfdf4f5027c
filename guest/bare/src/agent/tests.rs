use stasis_guest_wire::frame;

use super::*;

fn wake(generation: u64) -> Wake {
    Wake {
        generation,
        entropy: "00".repeat(64),
        wall_clock_ns: 1,
        hostname: format!("vm-{generation}"),
        machine_id: "a".repeat(32),
        boot_nonce: "nonce".into(),
    }
}

fn woken(agent: &mut Agent, generation: u64) -> Connection {
    let mut connection = Connection::default();
    let order = wake(generation);
    let turn = connection.received(&frame::encode(&FromNode::Wake(order.clone())).unwrap(), agent);
    match frame::receive(&mut turn.output.as_slice()).unwrap() {
        FromAgent::Awake(certificate) => assert_eq!(certificate.verify(&order, "boot"), Ok(())),
        other => panic!("{other:?}"),
    }
    connection
}

fn text(turn: &Turn) -> String {
    String::from_utf8(turn.output.clone()).unwrap()
}

#[test]
fn a_wake_is_proved_and_a_request_behind_it_is_answered() {
    let mut agent = Agent::new("boot".into());
    let mut connection = Connection::default();
    let bytes = [&*frame::encode(&FromNode::Wake(wake(1))).unwrap(), b"GET / HTTP/1.1\r\n\r\nGET /identity"].concat();
    let turns: Vec<_> = bytes.iter().map(|&byte| connection.received(&[byte], &mut agent)).collect();
    let output: Vec<_> = turns.into_iter().flat_map(|turn| turn.output).collect();
    assert!(output.ends_with(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok\n"));
    let turn = connection.received(b" HTTP/1.1\r\n\r\n", &mut agent);
    assert!(text(&turn).contains("\"hostname\":\"vm-1\"") && text(&turn).contains("\"answered\":2"), "{}", text(&turn));
}

#[test]
fn a_life_ends_the_connections_of_those_before_it() {
    let mut agent = Agent::new("boot".into());
    let first = woken(&mut agent, 1);
    assert!(!first.is_stale(&agent));
    let second = woken(&mut agent, 2);
    assert!(first.is_stale(&agent) && !second.is_stale(&agent));
    let turn = Connection::default().received(&frame::encode(&FromNode::Wake(wake(2))).unwrap(), &mut agent);
    assert!(turn.ends && matches!(frame::receive(&mut turn.output.as_slice()).unwrap(), FromAgent::Refused { .. }));
}

#[test]
fn nothing_passes_before_a_wake() {
    let mut agent = Agent::new("boot".into());
    let forward = frame::encode(&FromNode::Forward).unwrap();
    let turn = Connection::default().received(&forward, &mut agent);
    assert!(turn.ends && matches!(frame::receive(&mut turn.output.as_slice()).unwrap(), FromAgent::Refused { .. }));
    woken(&mut agent, 1);
    let turn = Connection::default().received(&[&*forward, b"GET /no HTTP/1.1\r\n\r\n"].concat(), &mut agent);
    assert!(!turn.ends && text(&turn).contains("404"));
    let turn = Connection::default().received(b"GET / HTTP/1.1\r\n\r\n", &mut agent);
    assert!(turn.ends);
}

#[test]
fn an_answer_that_is_due_later_holds_up_its_connection_only() {
    let mut agent = Agent::new("boot".into());
    let (mut slow, mut quick) = (woken(&mut agent, 1), Connection::default());
    let turn = slow.received(b"GET /wait/250 HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n", &mut agent);
    assert_eq!(turn, Turn { later: Some(Duration::from_micros(250)), ..Turn::default() });
    let forward = frame::encode(&FromNode::Forward).unwrap();
    let turn = quick.received(&[&*forward, b"GET / HTTP/1.1\r\n\r\n"].concat(), &mut agent);
    assert!(text(&turn).ends_with("ok\n"));
    assert!(text(&slow.due(&mut agent)).ends_with("waited\nHTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok\n"));
}

#[test]
fn memory_keeps_a_body() {
    let mut agent = Agent::new("boot".into());
    let mut connection = woken(&mut agent, 1);
    let part = connection.received(b"PUT /memory HTTP/1.1\r\nContent-Length: 6\r\n\r\ncan", &mut agent);
    assert_eq!(part, Turn::default());
    connection.received(b"ary", &mut agent);
    let turn = connection.received(b"GET /memory HTTP/1.1\r\nConnection: close\r\n\r\n", &mut agent);
    assert!(text(&turn).ends_with("canary") && turn.ends);
}

#[test]
fn what_is_no_request_ends_the_connection() {
    for (request, status) in [
        ("\u{0}\r\n\r\n", "400"),
        ("PUT /memory HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", "411"),
        ("PUT /memory HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n", "413"),
    ] {
        let mut agent = Agent::new("boot".into());
        let turn = woken(&mut agent, 1).received(request.as_bytes(), &mut agent);
        assert!(turn.ends && text(&turn).contains(status), "{request:?}: {}", text(&turn));
    }
}
