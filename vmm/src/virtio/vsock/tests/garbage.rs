//! Guests that flood, stall and lie.

use proptest::prelude::*;

use super::{super::mux::MAX_CONTROL, *};
use crate::virtio::driver::{Buffer, NEEDS_RESET};

/// With event_idx the guest tells of new buffers only if it was asked to, after the last one was taken.
#[test]
fn a_receive_queue_that_ran_empty_is_told_of() {
    let mut rig = Rig::new(4);
    let (mut stream, host) = open(&mut rig, ROOMY);
    stream.write_all(&pattern(100_000)).unwrap();
    rig.settle(); // output waits, no buffer is left
    rig.spare_buffer();
    assert!(rig.driver.must_notify(RX));
    rig.driver.kick(RX);
    assert!(rig.receive().len() >= 5);
    rig.send(&packet(host, op::RST));
}

#[test]
fn input_waits_while_answers_pile_up_and_goes_on_after() {
    let mut rig = Rig::new(0);
    for _ in 0..2 {
        (0..250).for_each(|_| rig.queue(&packet(7, op::RW)));
        rig.settle();
        rig.driver.used(TX);
    }
    assert_eq!(rig.vsock(|vsock| vsock.mux.control_waiting()), MAX_CONTROL, "500 packets want a reset each");
    let mut answers = 0;
    rig.spare_buffer();
    rig.driver.kick(RX);
    while let got @ 1.. = rig.receive().len() {
        answers += got;
    }
    assert_eq!(answers, 500);
    assert!(rig.driver.must_notify(TX) || !rig.driver.turn(TX));
    rig.queue(&packet(7, op::RW));
    assert!(rig.driver.must_notify(TX), "and the guest is asked to tell of more");
}

/// Room for answers may come in the very turn that ran out of it, without another word of the guest.
#[test]
fn input_that_waits_for_room_goes_on_in_the_turn_that_makes_it() {
    let mut rig = Rig::new(0);
    (0..200).for_each(|_| rig.queue(&packet(7, op::RW)));
    rig.settle();
    assert_eq!(rig.driver.used(TX).len(), 200);
    (0..100).for_each(|_| rig.spare_buffer());
    (0..100).for_each(|_| rig.queue(&packet(7, op::RW)));
    rig.driver.kick(TX);
    assert_eq!((rig.driver.used(TX).len(), rig.driver.used(RX).len()), (100, 100));
}

/// Both ways at once, more than one turn's worth: the event loop is given back in between.
#[test]
fn a_turn_is_bounded() {
    let mut rig = Rig::new(250);
    (0..250).for_each(|_| rig.queue(&packet(7, op::RW)));
    assert!(rig.driver.turn(TX));
    assert!(rig.driver.used(TX).len() + rig.driver.used(RX).len() <= PACKETS_PER_TURN as usize);
    rig.driver.kick(TX);
    assert_eq!(rig.vsock(|vsock| vsock.mux.control_waiting()), 0);
}

#[test]
fn a_buffer_without_room_ends_the_connection_that_needed_it() {
    let mut rig = Rig::new(0);
    let mut stream = rig.connect(80);
    rig.spare_buffer();
    rig.driver.kick(RX);
    let request = rig.driver.used(RX);
    assert_eq!(request.len(), 1);
    rig.send(&packet(FIRST_EPHEMERAL, op::RESPONSE));
    stream.write_all(b"data").unwrap();
    rig.driver.add(RX, &[Buffer(0x50_0000, 44, true), Buffer(0x51_0000, 0, true)]);
    rig.settle();
    assert!(at_end_or_reset(&stream));
}

fn at_end_or_reset(mut stream: &UnixStream) -> bool {
    matches!(stream.read(&mut [0]), Ok(0)) || stream.write(b"x").is_err()
}

#[test]
fn unusable_buffers_and_packets_are_returned() {
    let mut rig = Rig::new(0);
    let bad = [Buffer(0x50_0000, 10, true), Buffer(0x50_0000, 100, false), Buffer(0x9000_0000, 4096, true)];
    for buffer in &bad {
        rig.driver.add(RX, &[*buffer]);
    }
    let _stream = rig.connect(80);
    assert_eq!(rig.driver.used(RX).iter().map(|(_, length)| *length).collect::<Vec<_>>(), [0, 0, 0]);
    let bad = [Buffer(0x50_0000, 10, false), Buffer(0x50_0000, 100, true), Buffer(u64::MAX - 3, 100, false)];
    for buffer in &bad {
        rig.driver.add(TX, &[*buffer]);
    }
    rig.queue_raw(&packet(7, op::RW), [GUEST_CID, mux::HOST_CID], 1, u32::MAX);
    rig.settle();
    assert_eq!(rig.driver.used(TX).len(), 4);
}

#[test]
fn packets_from_or_for_elsewhere_are_reset() {
    let mut rig = Rig::new(8);
    for (cids, kind) in [([4, 2], 1), ([3, 9], 1), ([3, 2], 2)] {
        rig.queue_raw(&packet(9000, op::REQUEST), cids, kind, 0);
        rig.settle();
        assert_eq!(ops(&rig.receive()), [op::RST]);
    }
    assert!(rig.vsock(Vsock::take_accepted).is_empty() && idle(&mut rig));
}

#[test]
fn indices_that_run_away_break_the_device() {
    for queue in [RX, TX] {
        let mut rig = Rig::new(0);
        rig.driver.set_avail_index(queue, 3000);
        let _stream = rig.connect(80);
        assert!(!rig.driver.turn(queue));
        assert_eq!(rig.driver.get(virtio_bindings::virtio_mmio::VIRTIO_MMIO_STATUS), 15 | NEEDS_RESET);
    }
}

/// Steps of a guest and a host that follow no rules.
#[derive(Debug, Clone)]
enum Step {
    Packet { host: u32, guest: u32, op: u16, flags: u32, credit: (u32, u32), length: usize },
    Receive,
    Connect(u32),
    Accept,
    HostWrites(usize),
    HostReads,
    HostCloses,
    HostHalfCloses,
}

fn step() -> impl Strategy<Value = Step> {
    let host = prop_oneof![3 => FIRST_EPHEMERAL..FIRST_EPHEMERAL + 4, 2 => 0..4u32, 1 => any::<u32>()];
    let credit = prop_oneof![Just(ROOMY), (any::<u32>(), any::<u32>())];
    let length = prop_oneof![Just(0), 0..100_usize, 0..66_000_usize];
    let packet = (host, 79..82u32, 0..9u16, 0..4u32, credit, length)
        .prop_map(|(host, guest, op, flags, credit, length)| Step::Packet { host, guest, op, flags, credit, length });
    prop_oneof![
        8 => packet,
        2 => Just(Step::Receive),
        1 => (79..82u32).prop_map(Step::Connect),
        1 => Just(Step::Accept),
        1 => (0..100_000_usize).prop_map(Step::HostWrites),
        1 => Just(Step::HostReads),
        1 => Just(Step::HostCloses),
        1 => Just(Step::HostHalfCloses),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_sequence_panics_spins_or_piles_up(steps in proptest::collection::vec(step(), 0..120), buffers in 0..20u64) {
        let mut rig = Rig::new(buffers);
        let mut streams: Vec<UnixStream> = Vec::new();
        for step in steps {
            match step {
                Step::Packet { host, guest, op, flags, credit, length } => {
                    rig.send(&Packet { host, guest, op, flags, credit, data: vec![1; length] });
                }
                Step::Receive => drop(rig.receive()),
                Step::Connect(port) => streams.push(rig.connect(port)),
                Step::Accept => {
                    let accepted = rig.vsock(Vsock::take_accepted).into_iter().map(|(_, stream)| stream);
                    streams.extend(accepted.inspect(|stream| stream.set_nonblocking(true).unwrap()));
                }
                Step::HostWrites(length) => {
                    streams.iter().for_each(|mut stream| drop(stream.write(&vec![2; length])));
                }
                Step::HostReads => streams.iter().for_each(|mut stream| drop(stream.read(&mut [0; 9000]))),
                Step::HostCloses => drop(streams.pop()),
                Step::HostHalfCloses => streams.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Write))),
            }
            rig.settle();
            prop_assert!(rig.vsock(|vsock| vsock.mux.control_waiting()) < MAX_CONTROL + 8 * 120);
        }
        drop(streams);
        drop(rig.vsock(Vsock::take_accepted));
        rig.settle();
        prop_assert!(rig.watched() <= 120);
    }
}
