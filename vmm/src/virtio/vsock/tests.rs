mod garbage;

use std::{
    io::{ErrorKind, Read, Write},
    net::Shutdown,
};

use vm_memory::{Bytes, GuestAddress};

use super::{
    guest::{Packet, Rig},
    mux::{FIRST_EPHEMERAL, MAX_CONNECTIONS, op},
    *,
};
use crate::virtio::driver::Buffer;

const BOTH: u32 = 3;
const NO_RECEIVE: u32 = 1;
const NO_SEND: u32 = 2;
const ROOMY: (u32, u32) = (256 * 1024, 0);

fn packet(host: u32, op: u16) -> Packet {
    Packet { host, guest: 80, op, credit: ROOMY, ..Packet::default() }
}

fn ops(packets: &[Packet]) -> Vec<u16> {
    packets.iter().map(|packet| packet.op).collect()
}

/// An open connection that the host asked for: its end, and its host port.
fn open(rig: &mut Rig, credit: (u32, u32)) -> (UnixStream, u32) {
    let stream = rig.connect(80);
    let request = rig.receive();
    assert_eq!((ops(&request), request[0].guest), (vec![op::REQUEST], 80));
    let host = request[0].host;
    rig.send(&Packet { credit, ..packet(host, op::RESPONSE) });
    (stream, host)
}

fn idle(rig: &mut Rig) -> bool {
    rig.watched() == 0 && rig.driver.transport.save().is_ok()
}

fn read_all(mut stream: &UnixStream) -> Vec<u8> {
    let mut all = Vec::new();
    match stream.read_to_end(&mut all) {
        Err(error) if error.kind() != ErrorKind::WouldBlock => panic!("{error}"),
        _ => all,
    }
}

fn at_end(mut stream: &UnixStream) -> bool {
    matches!(stream.read(&mut [0]), Ok(0))
}

fn pattern(length: usize) -> Vec<u8> {
    (0..=250).cycle().take(length).collect()
}

#[test]
fn data_larger_than_credit_and_buffers_reaches_the_guest() {
    let mut rig = Rig::new(8);
    let (mut stream, host) = open(&mut rig, (10_000, 0));
    let sent = pattern(1 << 20);
    let (mut given, mut got) = (0, Vec::new());
    while got.len() < sent.len() {
        if let Ok(taken) = stream.write(&sent[given..]) {
            given += taken;
        }
        rig.settle();
        let packets = rig.receive();
        got.extend(packets.into_iter().filter(|packet| packet.op == op::RW).flat_map(|packet| packet.data));
        let forwarded = u32::try_from(got.len()).unwrap();
        rig.send(&Packet { credit: (10_000, forwarded), ..packet(host, op::CREDIT_UPDATE) });
    }
    assert!(got == sent);
}

#[test]
fn credit_is_never_overdrawn() {
    let mut rig = Rig::new(64);
    let (mut stream, host) = open(&mut rig, (10_000, 0));
    stream.write_all(&pattern(50_000)).unwrap();
    rig.settle();
    let received = |packets: Vec<Packet>| packets.iter().map(|packet| packet.data.len()).sum::<usize>();
    assert_eq!(received(rig.receive()), 10_000);
    assert_eq!(rig.watched(), 0, "a stream that waits for credit is not watched");
    rig.send(&Packet { credit: (10_000, 3_000), ..packet(host, op::CREDIT_UPDATE) });
    assert_eq!(received(rig.receive()), 3_000);
    rig.send(&Packet { credit: (0, 99), ..packet(host, op::CREDIT_UPDATE) });
    assert_eq!(received(rig.receive()), 0, "nor does nonsense make any");
}

#[test]
fn data_larger_than_credit_reaches_the_host() {
    let mut rig = Rig::new(8);
    let (stream, host) = open(&mut rig, ROOMY);
    let sent = pattern(1 << 20);
    let (mut given, mut got, mut credit) = (0_usize, Vec::new(), (0_u32, 0_u32));
    while got.len() < sent.len() {
        let told = rig.receive();
        assert!(told.iter().all(|packet| packet.op == op::CREDIT_UPDATE), "{told:?}");
        credit = told.last().map_or(credit, |packet| packet.credit);
        if credit.0 == 0 {
            rig.send(&packet(host, op::CREDIT_REQUEST));
            continue;
        }
        let room = (credit.0 - (u32::try_from(given).unwrap() - credit.1)) as usize;
        let length = room.min(60_000).min(sent.len() - given);
        if length > 0 {
            let data = sent[given..given + length].to_vec();
            rig.send(&Packet { data, ..packet(host, op::RW) });
            given += length;
        } else {
            got.extend(read_all(&stream)); // only now, when the guest may send no more
            rig.settle();
        }
    }
    assert!(got == sent);
}

#[test]
fn the_hosts_half_close_leaves_the_other_half() {
    let mut rig = Rig::new(8);
    let (mut stream, host) = open(&mut rig, ROOMY);
    stream.write_all(b"question").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    rig.settle();
    let packets = rig.receive();
    assert_eq!((ops(&packets), packets[1].flags), (vec![op::RW, op::SHUTDOWN], NO_SEND));
    rig.send(&Packet { data: b"answer".to_vec(), ..packet(host, op::RW) });
    rig.send(&Packet { flags: BOTH, ..packet(host, op::SHUTDOWN) });
    assert_eq!((read_all(&stream).as_slice(), at_end(&stream)), (&b"answer"[..], true));
    assert_eq!(ops(&rig.receive()), [op::RST]);
    assert!(idle(&mut rig));
}

#[test]
fn the_guests_half_close_leaves_the_other_half() {
    let mut rig = Rig::new(8);
    let (mut stream, host) = open(&mut rig, ROOMY);
    rig.send(&Packet { data: b"done".to_vec(), ..packet(host, op::RW) });
    rig.send(&Packet { flags: NO_SEND, ..packet(host, op::SHUTDOWN) });
    assert_eq!((read_all(&stream).as_slice(), at_end(&stream)), (&b"done"[..], true));
    stream.write_all(b"still here").unwrap();
    rig.settle();
    assert_eq!(rig.receive()[0].data, b"still here");
    drop(stream);
    rig.settle();
    assert_eq!(ops(&rig.receive()), [op::RST]);
    assert!(idle(&mut rig));
}

#[test]
fn a_guest_that_receives_no_more_is_sent_nothing() {
    let mut rig = Rig::new(8);
    let (mut stream, host) = open(&mut rig, ROOMY);
    rig.send(&Packet { flags: NO_RECEIVE, ..packet(host, op::SHUTDOWN) });
    assert_eq!(stream.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
    assert_eq!(rig.receive(), []);
    rig.send(&Packet { data: b"but sends".to_vec(), ..packet(host, op::RW) });
    assert_eq!(read_all(&stream), b"but sends");
    drop(stream);
    rig.settle();
    assert_eq!(ops(&rig.receive()), [op::RST]);
}

#[test]
fn what_waited_for_credit_is_not_sent_to_a_guest_that_receives_no_more() {
    let mut rig = Rig::new(8);
    let (mut stream, host) = open(&mut rig, (0, 0));
    stream.write_all(b"too late").unwrap();
    rig.settle();
    rig.send(&Packet { flags: NO_RECEIVE, ..packet(host, op::SHUTDOWN) });
    assert_eq!(rig.receive(), []);
}

#[test]
fn a_host_that_closes_for_good_frees_the_connection() {
    let mut rig = Rig::new(8);
    let (mut stream, _) = open(&mut rig, ROOMY);
    stream.write_all(b"last words").unwrap();
    drop(stream);
    rig.settle();
    assert_eq!(ops(&rig.receive()), [op::RW, op::RST]);
    assert!(idle(&mut rig), "even if the guest never says a word");

    let (stream, _) = open(&mut rig, ROOMY);
    stream.shutdown(Shutdown::Write).unwrap();
    rig.settle();
    assert_eq!(ops(&rig.receive()), [op::SHUTDOWN]);
    drop(stream);
    rig.settle();
    assert_eq!(ops(&rig.receive()), [op::RST], "a half-closed stream too");
    assert!(idle(&mut rig));
}

#[test]
fn a_refused_port_closes_the_hosts_stream() {
    let mut rig = Rig::new(8);
    let stream = rig.connect(81);
    let request = rig.receive();
    rig.send(&Packet { guest: 81, ..packet(request[0].host, op::RST) });
    assert!(at_end(&stream) && idle(&mut rig));
    assert_eq!(rig.receive(), [], "a reset is not answered");
}

#[test]
fn bytes_written_before_the_guest_accepts_are_kept() {
    let mut rig = Rig::new(8);
    let mut stream = rig.connect(80);
    stream.write_all(b"early").unwrap();
    rig.settle();
    let request = rig.receive();
    assert_eq!(ops(&request), [op::REQUEST]);
    assert!(rig.driver.transport.save().is_err(), "no snapshot of a connection");
    rig.send(&packet(request[0].host, op::RESPONSE));
    assert_eq!(rig.receive()[0].data, b"early");
    rig.send(&packet(request[0].host, op::RST));
    assert!(idle(&mut rig));
}

#[test]
fn the_guest_connects() {
    let mut rig = Rig::new(8);
    rig.send(&packet(9000, op::REQUEST));
    assert_eq!(ops(&rig.receive()), [op::RESPONSE]);
    let accepted = rig.vsock(Vsock::take_accepted);
    let [(9000, stream)] = accepted.as_slice() else { panic!("{accepted:?}") };
    rig.send(&Packet { data: b"hello".to_vec(), ..packet(9000, op::RW) });
    stream.set_nonblocking(true).unwrap();
    assert_eq!(read_all(stream), b"hello");
    rig.send(&packet(9000, op::REQUEST));
    assert_eq!(ops(&rig.receive()), [op::RST], "there is one already");
    rig.send(&packet(FIRST_EPHEMERAL, op::REQUEST));
    assert_eq!(ops(&rig.receive()), [op::RST], "the host's own ports are no servers");
}

#[test]
fn a_guest_that_overdraws_its_credit_is_cut_off() {
    let mut rig = Rig::new(8);
    let (stream, host) = open(&mut rig, ROOMY);
    for _ in 0..40 {
        rig.send(&Packet { data: pattern(60_000), ..packet(host, op::RW) });
    }
    assert!(!read_all(&stream).is_empty() && at_end(&stream));
    let mut told = Vec::new();
    while let packets @ [_, ..] = rig.receive().as_slice() {
        told.extend(ops(packets));
    }
    assert!(told.contains(&op::RST) && idle(&mut rig));
}

#[test]
fn there_are_only_so_many_connections() {
    let mut rig = Rig::new(8);
    let mut streams: Vec<_> = (1..).take(MAX_CONNECTIONS / 2).map(|_| rig.connect(80)).collect();
    for port in (1..).take(MAX_CONNECTIONS) {
        rig.send(&packet(port, op::REQUEST));
        streams.extend(rig.vsock(Vsock::take_accepted).into_iter().map(|(_, stream)| stream));
        rig.receive();
    }
    assert_eq!(streams.len(), MAX_CONNECTIONS);
    assert!(at_end(&rig.connect(80)), "refused by closing");
    rig.driver.set(virtio_bindings::virtio_mmio::VIRTIO_MMIO_STATUS, 0);
    assert!(streams.iter().all(at_end), "a reset closes them all");
}

#[test]
fn far_ends_that_nobody_takes_count() {
    let mut rig = Rig::new(128);
    for port in 0..2000 {
        rig.send(&packet(port, op::REQUEST));
        rig.send(&packet(port, op::RST));
        rig.receive();
    }
    assert_eq!(rig.vsock(Vsock::take_accepted).len(), MAX_CONNECTIONS);
}

/// A live snapshot holds no connections, so what is restored from it tells its guest that they are gone: once, and as soon as it can.
#[test]
fn a_restored_guest_hears_that_its_connections_are_gone() {
    const EVENTS: usize = 2;
    let mut rig = Rig::new(8);
    let (stream, _) = open(&mut rig, ROOMY);
    assert!(rig.driver.transport.save().is_err(), "only a live snapshot may cut a connection");
    let cut = rig.driver.transport.save_cut().unwrap();
    assert!(cut.is_cut() && !at_end(&stream), "the source keeps its connection");
    let at = 0x60_0000;
    let mut buffer = [0xff; 4];
    rig.driver.memory.write_slice(&buffer, GuestAddress(at)).unwrap();

    rig.driver.transport.restore(&cut).unwrap();
    assert!(at_end(&stream), "a used device loses what it has open");
    assert!(rig.driver.transport.save().is_err(), "the guest must hear of it first");
    let _ = rig.driver.transport.wake().unwrap();
    rig.driver.add(EVENTS, &[Buffer(at, 4, true)]);
    rig.driver.turn(EVENTS);
    assert_eq!(rig.driver.used(EVENTS).len(), 1);
    rig.driver.memory.read_slice(&mut buffer, GuestAddress(at)).unwrap();
    assert_eq!(u32::from_le_bytes(buffer), 0, "VIRTIO_VSOCK_EVENT_TRANSPORT_RESET");

    rig.driver.add(EVENTS, &[Buffer(at, 4, true)]);
    rig.driver.turn(EVENTS);
    let _ = rig.driver.transport.wake().unwrap();
    assert_eq!(rig.driver.used(EVENTS).len(), 0, "once");
    assert!(!rig.driver.transport.save_cut().unwrap().is_cut());
}
