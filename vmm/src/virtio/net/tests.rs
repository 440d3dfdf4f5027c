//! Real frames over a real TAP; the host's own network stack is at the other end.

mod host;

use std::{os::fd::AsRawFd, sync::Arc, time::Duration};

use proptest::{
    collection::vec,
    prelude::{ProptestConfig, any},
    test_runner::TestRunner,
};
use stasis_vmm_api::RateLimit;
use virtio_bindings::{
    virtio_mmio as reg,
    virtio_net::{
        VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6, VIRTIO_NET_F_HOST_USO,
        VIRTIO_NET_HDR_GSO_UDP_L4,
    },
};
use vm_memory::{Bytes, GuestAddress};

use self::host::*;
use super::*;
use crate::virtio::{
    driver::{BUFFERS, Buffer, Driver, FEATURES, NEEDS_RESET, other_device},
    rate_limit::tests::{bucket, limiter, wait_for},
};

/// Room for the longest frame.
const ROOM: u32 = 0x1_1000;
const CSUM: u64 = 1 << VIRTIO_NET_F_CSUM | 1 << VIRTIO_NET_F_GUEST_CSUM;
const USO: u64 = 1 << VIRTIO_NET_F_GUEST_USO4 | 1 << VIRTIO_NET_F_GUEST_USO6;

struct Rig {
    driver: Driver,
    tap: File,
    watched: Arc<Watched>,
}

/// A device over a TAP of the test's own, its driver ready with these features; or nothing, loudly.
fn rig(features: u64) -> Option<Rig> {
    let tap = tap()?;
    let watched = Arc::new(Watched::default());
    let mut driver = Driver::cold(Box::new(device(&tap, &watched)));
    driver.power_on_with(words(features));
    Some(Rig { driver, tap, watched })
}

fn device(tap: &File, watched: &Arc<Watched>) -> Net {
    let network = Network { mac: GUEST_MAC, rate: None };
    Net::new(tap.try_clone().unwrap(), &network, watched.sources()).unwrap()
}

fn words(features: u64) -> [u32; 2] {
    let halves = [features & 0xffff_ffff, features >> 32].map(|half| u32::try_from(half).unwrap());
    [FEATURES[0] | halves[0], FEATURES[1] | halves[1]]
}

impl Rig {
    fn offer_buffers(&mut self, count: u64) {
        for n in 0..count {
            self.driver.add(RX, &[Buffer(BUFFERS + n * u64::from(ROOM), ROOM, true)]);
        }
        self.driver.kick(RX);
    }

    /// The frames that came into the buffers offered since the last call, with their headers.
    fn received(&mut self) -> Vec<Vec<u8>> {
        wait_for(self.tap.as_fd());
        while self.driver.source(TAP) {}
        (0..)
            .zip(self.driver.used(RX))
            .map(|(n, (_, length))| self.bytes(BUFFERS + n * u64::from(ROOM), length))
            .collect()
    }

    fn bytes(&self, at: u64, length: u32) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        self.driver.memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }

    /// Sends one frame behind a header, in two buffers.
    fn send(&mut self, header: [u8; HEADER], frame: &[u8]) {
        self.add(header, frame);
        self.driver.kick(TX);
        assert_eq!(self.driver.used(TX).len(), 1);
    }

    fn add(&mut self, header: [u8; HEADER], frame: &[u8]) {
        let at = BUFFERS + 0x40_0000;
        self.driver.memory.write_slice(&[&header[..], frame].concat(), GuestAddress(at)).unwrap();
        let length = u32::try_from(HEADER + frame.len()).unwrap();
        self.driver.add(TX, &[Buffer(at, 20, false), Buffer(at + 20, length - 20, false)]);
    }
}

/// A header that leaves a datagram's checksum to the device.
const PARTIAL: [u8; HEADER] = [1, 0, 0, 0, 0, 0, 34, 0, 6, 0, 0, 0];

fn receive(socket: &std::net::UdpSocket) -> Vec<u8> {
    let mut bytes = [0; 2048];
    let length = socket.recv(&mut bytes).unwrap();
    bytes[..length].to_vec()
}

#[test]
fn frames_reach_the_host_with_and_without_a_checksum() {
    let Some(mut rig) = rig(CSUM) else { return };
    let socket = socket();
    let port = socket.local_addr().unwrap().port();
    rig.send([0; HEADER], &datagram(port, b"plain", false));
    assert_eq!(receive(&socket), b"plain");
    rig.send(PARTIAL, &datagram(port, b"partial", true));
    assert_eq!(receive(&socket), b"partial");
    // What is no frame is lost, and what comes after it is not.
    let at = BUFFERS + 0x40_0000;
    for bad in [Buffer(at, 0, false), Buffer(at, 25, false), Buffer(at, 0x2_0000, false), Buffer(at, 64, true)] {
        rig.driver.add(TX, &[bad]);
    }
    rig.add([0xff; HEADER], &datagram(port, b"no such header", false));
    rig.driver.kick(TX);
    assert_eq!(rig.driver.used(TX).len(), 5);
    rig.send([0; HEADER], &datagram(port, b"last", false));
    assert_eq!(receive(&socket), b"last");
}

#[test]
fn the_host_cuts_what_the_guest_leaves_whole() {
    let Some(mut rig) = rig(CSUM | 1 << VIRTIO_NET_F_HOST_USO) else { return };
    let socket = socket();
    let frame = datagram(socket.local_addr().unwrap().port(), &[0xda; 4000], true);
    let kind = u8::try_from(VIRTIO_NET_HDR_GSO_UDP_L4).unwrap();
    rig.send([1, kind, 42, 0, 0xe8, 3, 34, 0, 6, 0, 0, 0], &frame);
    for _ in 0..4 {
        assert_eq!(receive(&socket), [0xda; 1000]);
    }
}

#[test]
fn frames_reach_the_guest() {
    let Some(mut rig) = rig(0) else { return };
    rig.offer_buffers(4);
    assert!(rig.watched.tap(), "an empty TAP is watched");
    let socket = socket();
    socket.send_to(b"hello", ("10.9.0.2", 9)).unwrap();
    let frames = rig.received();
    assert!(rig.driver.interrupted());
    let [frame] = &frames[..] else { panic!("{frames:?}") };
    assert_eq!(frame[..HEADER], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0], "one buffer, nothing left to do");
    assert_eq!(frame[HEADER..HEADER + 14], [&GUEST_MAC[..], &TAP_MAC, &[8, 0]].concat());
    assert!(frame.ends_with(b"hello"));
}

/// The same large send, as two drivers want it. Each driver's snapshot is restored too, over a TAP that knows of nothing.
#[test]
fn the_host_leaves_to_the_driver_what_it_negotiated_and_again_after_a_restore() {
    for (features, expected) in [(CSUM | USO, 1), (CSUM, 4)] {
        let Some(mut rig) = rig(features) else { return };
        let socket = socket();
        cut_into(&socket, 1000);
        for restored in [false, true] {
            if restored {
                let device = Box::new(device(&rig.tap, &rig.watched));
                rig.driver = rig.driver.restored(device).unwrap();
                assert!(!rig.driver.transport.wake().unwrap());
                assert!(rig.watched.tap());
            }
            rig.offer_buffers(8);
            socket.send_to(&[0xda; 4000], ("10.9.0.2", 9)).unwrap();
            let frames = rig.received();
            assert_eq!(frames.len(), expected, "{restored}");
            assert!(frames.iter().all(|frame| frame[0] == 1), "the checksum is the driver's to add");
            let kind = u32::from(frames[0][1]);
            assert_eq!(kind == VIRTIO_NET_HDR_GSO_UDP_L4, expected == 1);
            let payload: usize = frames.iter().map(|frame| frame.len() - HEADER - 42).sum();
            assert_eq!(payload, 4000);
            // The buffers that are left, so that the next ones start at the first place.
            rig.driver.set(reg::VIRTIO_MMIO_STATUS, 0);
            rig.driver.power_on_with(words(features));
        }
    }
}

#[test]
fn a_frame_waits_in_the_tap_for_a_buffer_and_one_that_does_not_fit_is_lost() {
    let Some(mut rig) = rig(CSUM) else { return };
    let socket = socket();
    rig.driver.add(RX, &[Buffer(BUFFERS, 64, true)]);
    rig.driver.kick(RX);
    socket.send_to(&[1; 100], ("10.9.0.2", 9)).unwrap();
    assert!(rig.received().is_empty(), "too long for the buffer");
    socket.send_to(&[2; 5], ("10.9.0.2", 9)).unwrap();
    assert_eq!(rig.received().len(), 1, "which takes the next one");

    socket.send_to(&[3; 5], ("10.9.0.2", 9)).unwrap();
    assert!(rig.received().is_empty());
    assert!(!rig.watched.tap(), "no loop spins on a frame that nobody has room for");
    rig.driver.add(RX, &[Buffer(BUFFERS, ROOM, true)]);
    assert!(rig.driver.must_notify(RX));
    rig.driver.kick(RX);
    assert_eq!(rig.driver.used(RX).len(), 1);
    assert!(rig.bytes(BUFFERS, 59).ends_with(&[3; 5]));
    rig.offer_buffers(1);
    assert!(rig.watched.tap());
}

#[test]
fn nothing_is_watched_for_a_driver_that_is_gone() {
    for broken in [false, true] {
        let Some(mut rig) = rig(0) else { return };
        rig.offer_buffers(1);
        assert!(rig.watched.tap());
        if broken {
            rig.driver.set_avail_index(TX, 1000);
            rig.driver.turn(TX);
            assert_eq!(rig.driver.get(reg::VIRTIO_MMIO_STATUS), 15 | NEEDS_RESET);
        } else {
            rig.driver.set(reg::VIRTIO_MMIO_STATUS, 0);
        }
        assert!(!rig.watched.tap());
        // Nor while the guest is paused; and when it runs again, yes.
        rig.driver.set(reg::VIRTIO_MMIO_STATUS, 0);
        rig.driver.power_on();
        rig.offer_buffers(1);
        rig.driver.transport.quiet();
        assert!(!rig.watched.tap());
        rig.driver.transport.wake().unwrap();
        assert!(rig.watched.tap());
        let Rig { driver, watched, .. } = rig;
        drop(driver);
        assert!(!watched.tap(), "the node may have it open still");
    }
}

#[test]
fn a_deleted_interface_is_left_alone() {
    let Some(mut rig) = rig(0) else { return };
    rig.offer_buffers(1);
    ip("link delete tap0").unwrap();
    assert!(!rig.driver.source(TAP));
    assert!(!rig.watched.tap());
    rig.send([0; HEADER], &datagram(9, b"lost", false));
    rig.offer_buffers(1);
    assert!(!rig.watched.tap());
}

/// The clock stands still here unless the test moves it.
#[test]
fn the_rate_holds_both_ways() {
    use crate::virtio::rate_limit::tests::advance;
    let Some(tap) = tap() else { return };
    let watched = Arc::new(Watched::default());
    let mut net = device(&tap, &watched);
    net.rx = Some(limiter(None, bucket(1000, 2)));
    net.tx = Some(limiter(None, bucket(1000, 2)));
    let mut rig = Rig { driver: Driver::live(Box::new(net)), tap, watched };
    rig.offer_buffers(8);
    let socket = socket();
    let port = socket.local_addr().unwrap().port();
    for n in 0..4 {
        socket.send_to(&[n], ("10.9.0.2", 9)).unwrap();
    }
    assert_eq!(rig.received().len(), 2);
    assert!(!rig.watched.tap(), "the timer is what is waited for");
    for n in 0..4 {
        rig.add([0; HEADER], &datagram(port, &[n], false));
    }
    assert!(!rig.driver.turn(TX));
    assert_eq!(rig.driver.used(TX).len(), 2);
    advance(Duration::from_millis(1));
    assert!(!rig.driver.source(TX_TIMER));
    assert_eq!(rig.driver.used(TX).len(), 1);
    advance(Duration::from_secs(1));
    rig.driver.source(RX_TIMER);
    assert_eq!(rig.driver.used(RX).len(), 2, "each direction has buckets of its own");
    assert_eq!(rig.driver.used(TX).len(), 1);
}

#[test]
fn only_a_tap_with_the_header_will_do_and_a_snapshot_is_one_interfaces() {
    let network = Network { mac: GUEST_MAC, rate: Some(RateLimit::default()) };
    let watched = Arc::new(Watched::default());
    let file = tempfile::tempfile().unwrap();
    assert!(Net::new(file, &network, watched.sources()).is_err());
    let Some(rig) = rig(CSUM) else { return };
    for mac in [[0; 6], [0xff; 6], [1, 0, 0, 0, 0, 1]] {
        let tap = rig.tap.try_clone().unwrap();
        assert!(matches!(Net::new(tap, &Network { mac, ..network }, watched.sources()), Err(Error::Refused(_))));
    }
    assert_eq!(rig.driver.get(reg::VIRTIO_MMIO_CONFIG), u32::from_le_bytes([2, 0, 0, 0]));
    assert!(rig.driver.restored(other_device()).is_err());
    let other = Network { mac: TAP_MAC, ..network };
    let other = Net::new(rig.tap.try_clone().unwrap(), &other, watched.sources()).unwrap();
    assert!(rig.driver.restored(Box::new(other)).is_err(), "another address");
    drop(rig);
    let without = open_tap(libc::IFF_TAP | libc::IFF_NO_PI).unwrap();
    assert!(without.as_raw_fd() > 0 && Net::new(without, &network, watched.sources()).is_err());
}

/// Whatever the descriptors say: no panic, no endless loop.
#[test]
fn no_descriptors_do_harm() {
    let Some(tap) = tap() else { return };
    let watched = Arc::new(Watched::default());
    let socket = socket();
    let descriptors = vec((0..3u8, any::<u64>(), any::<u32>(), 0..8u16, 0..300u16), 1..32);
    let heads = vec((0..2usize, 0..40u16), 1..64);
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) };
    let outcome = TestRunner::new(config).run(&(descriptors, heads), |(descriptors, heads)| {
        let mut driver = Driver::cold(Box::new(device(&tap, &watched)));
        driver.power_on_with(words(CSUM | USO));
        for (index, (place, address, length, flags, next)) in (0..).zip(descriptors) {
            let (address, length) = match place {
                0 => (address, length),
                1 => (BUFFERS + address % 0x1000, length % 100),
                _ => (BUFFERS + address % 0x1000, length % 0x1_2000),
            };
            (0..2).for_each(|queue| driver.put_descriptor(queue, index, address, length, flags, next));
        }
        for (queue, head) in heads {
            driver.offer(queue, head);
        }
        socket.send_to(&[1; 300], ("10.9.0.2", 9)).unwrap();
        for queue in [RX, TX].repeat(100) {
            driver.turn(queue);
            driver.source(TAP);
        }
        Ok(())
    });
    outcome.unwrap();
}
