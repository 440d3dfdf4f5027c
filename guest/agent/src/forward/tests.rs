use std::{
    io::{Read, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use super::*;
use crate::poll::wait_until;

/// Runs a pair on a thread of its own; its two far ends and how it ended.
fn forward(early: &[u8]) -> (UnixStream, UnixStream, mpsc::Receiver<io::Result<()>>) {
    let (client, near_client) = UnixStream::pair().unwrap();
    let (function, near_function) = UnixStream::pair().unwrap();
    let mut pair = Pair::new(near_client.into(), near_function.into(), early.to_vec());
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        let mut turns = 0;
        let result = loop {
            turns += 1;
            assert!(turns < 1_000_000, "it spins");
            match turn(&mut pair) {
                Ok(Progress::Going) => {}
                Ok(Progress::Finished) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        drop(pair);
        tell.send(result).unwrap();
    });
    (client, function, told)
}

fn turn(pair: &mut Pair) -> io::Result<Progress> {
    let mut ready = [PollFlags::empty(); 2];
    let polls = pair.polls();
    let fds: Vec<_> = polls.iter().flatten().copied().collect();
    let reported = wait_until(&fds, Some(Instant::now() + Duration::from_secs(20)))?;
    assert!(reported.iter().any(|flags| !flags.is_empty()), "it hangs");
    let mut reported = reported.into_iter();
    for (end, poll) in polls.iter().enumerate() {
        if poll.is_some() {
            ready[end] = reported.next().unwrap();
        }
    }
    pair.step(ready, &mut [0; 4096])
}

fn ended(told: &mpsc::Receiver<io::Result<()>>) -> io::Result<()> {
    told.recv_timeout(Duration::from_secs(20)).unwrap()
}

fn pattern(length: usize, salt: usize) -> Vec<u8> {
    (0..length).map(|at| u8::try_from((at * 31 + at / 251 + salt) % 256).unwrap()).collect()
}

#[test]
fn large_bodies_pass_both_ways_at_once() {
    let (client, function, told) = forward(b"");
    let sides = [(client, 1), (function, 2)].map(|(stream, salt)| {
        let mut writer = stream.try_clone().unwrap();
        let writes = thread::spawn(move || {
            writer.write_all(&pattern(5_000_000, salt)).unwrap();
            writer.shutdown(Shutdown::Write).unwrap();
        });
        let reads = thread::spawn(move || {
            let mut got = Vec::new();
            (&stream).read_to_end(&mut got).unwrap();
            assert!(got == pattern(5_000_000, 3 - salt));
        });
        (writes, reads)
    });
    for (writes, reads) in sides {
        writes.join().unwrap();
        reads.join().unwrap();
    }
    ended(&told).unwrap();
}

#[test]
fn early_bytes_come_first() {
    let (mut client, mut function, _told) = forward(b"GET / ");
    client.write_all(b"HTTP/1.1").unwrap();
    let mut got = [0; 14];
    function.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"GET / HTTP/1.1");
}

#[test]
fn a_half_closed_client_still_gets_its_answer() {
    let (mut client, mut function, told) = forward(b"");
    client.write_all(b"question").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut got = String::new();
    function.read_to_string(&mut got).unwrap();
    assert_eq!(got, "question");
    function.write_all(b"answer").unwrap();
    drop(function);
    got.clear();
    client.read_to_string(&mut got).unwrap();
    assert_eq!(got, "answer");
    ended(&told).unwrap();
}

#[test]
fn a_half_closed_function_still_gets_the_rest() {
    let (mut client, mut function, told) = forward(b"");
    function.write_all(b"early").unwrap();
    function.shutdown(Shutdown::Write).unwrap();
    let mut got = String::new();
    client.read_to_string(&mut got).unwrap();
    client.write_all(b"late").unwrap();
    drop(client);
    got.clear();
    function.read_to_string(&mut got).unwrap();
    assert_eq!(got, "late");
    ended(&told).unwrap();
}

#[test]
fn a_client_that_goes_away_ends_the_function_s_connection() {
    let (client, mut function, told) = forward(b"");
    drop(client);
    let mut got = Vec::new();
    // Its end is told first; the function then writes into nothing, and learns it.
    assert_eq!(function.read_to_end(&mut got).unwrap(), 0);
    let failed = (0..1000).any(|_| function.write_all(&[0; 4096]).is_err());
    assert!(failed && ended(&told).is_err());
}

#[test]
fn a_function_that_dies_with_an_answer_half_written_ends_both() {
    let (mut client, mut function, told) = forward(b"");
    function.write_all(b"half").unwrap();
    drop(function);
    let mut got = Vec::new();
    client.read_to_end(&mut got).unwrap();
    assert_eq!(got, b"half");
    let failed = (0..1000).any(|_| client.write_all(&[0; 4096]).is_err());
    assert!(failed && ended(&told).is_err());
}

#[test]
fn a_slow_reader_holds_the_writer_back_and_loses_nothing() {
    let (mut client, mut function, told) = forward(b"");
    function.set_nonblocking(true).unwrap();
    let body = pattern(4_000_000, 7);
    let mut written = 0;
    // Nobody reads: the sockets and one held chunk fill up, and no more is taken.
    let blocked = Instant::now() + Duration::from_secs(20);
    while Instant::now() < blocked {
        match function.write(&body[written..]) {
            Ok(count) => written += count,
            Err(_) => {
                let deadline = Instant::now() + Duration::from_millis(200);
                let free = wait_until(&[(function.as_fd(), PollFlags::POLLOUT)], Some(deadline)).unwrap();
                if free[0].is_empty() {
                    break;
                }
            }
        }
    }
    assert!(written < body.len(), "no back-pressure");
    let mut got = vec![0; written];
    client.read_exact(&mut got).unwrap();
    assert!(got == body[..written]);
    function.set_nonblocking(false).unwrap();
    let rest = body[written..].to_vec();
    let writes = thread::spawn(move || function.write_all(&rest).unwrap());
    let mut rest = Vec::new();
    client.shutdown(Shutdown::Write).unwrap();
    client.read_to_end(&mut rest).unwrap();
    assert!(rest == body[written..]);
    writes.join().unwrap();
    ended(&told).unwrap();
}
