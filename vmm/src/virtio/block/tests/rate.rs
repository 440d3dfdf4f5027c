//! Requests under a rate limit. The clock stands still unless a test moves it.

use std::time::Duration;

use super::*;
use crate::virtio::rate_limit::tests::{advance, bucket, limiter};

fn limited(bytes: Option<stasis_vmm_api::TokenBucket>, operations: Option<stasis_vmm_api::TokenBucket>) -> Rig {
    Rig::with(8, false, Some(limiter(bytes, operations)))
}

/// Asks for one sector, without telling the device.
fn ask(rig: &mut Rig) {
    let chain = [rig.header(VIRTIO_BLK_T_IN, 0), Buffer(DATA, 512, true), Buffer(STATUS, 1, true)];
    rig.driver.add(0, &chain);
}

#[test]
fn what_is_beyond_the_burst_waits_for_the_timer() {
    let mut rig = limited(None, bucket(1000, 3));
    (0..5).for_each(|_| ask(&mut rig));
    assert!(!rig.driver.turn(0), "the queue is left; nobody comes back to it but the timer");
    assert_eq!(rig.driver.used(0).len(), 3);
    assert!(!rig.driver.turn(0), "nor does a driver that insists get more");
    assert!(rig.driver.used(0).is_empty());
    for _ in 0..2 {
        advance(Duration::from_millis(1));
        assert!(!rig.driver.source(0));
        assert_eq!(rig.driver.used(0).len(), 1);
    }
    advance(Duration::from_secs(1));
    assert!(!rig.driver.source(0));
    ask(&mut rig);
    assert!(rig.driver.must_notify(0), "the driver tells of new requests again");
}

#[test]
fn bytes_count_both_ways_and_a_large_request_is_paid_off() {
    let mut rig = limited(bucket(1_000_000, 1000), None);
    let parts: Vec<_> = (0..4).map(|i| Buffer(DATA + i * 1024, 1024, true)).collect();
    assert_eq!(rig.request(VIRTIO_BLK_T_IN, 0, &parts).0, OK, "4113 bytes, of which 3113 were not there");
    ask(&mut rig);
    assert!(!rig.driver.turn(0));
    advance(Duration::from_micros(3113));
    assert!(!rig.driver.source(0));
    assert!(rig.driver.used(0).is_empty());
    advance(Duration::from_micros(2));
    assert!(!rig.driver.source(0));
    assert_eq!(rig.driver.used(0).len(), 1);
}

#[test]
fn what_was_held_back_goes_on_after_a_restore_with_a_full_bucket() {
    let mut rig = limited(None, bucket(1, 2));
    (0..4).for_each(|_| ask(&mut rig));
    rig.driver.kick(0);
    assert_eq!(rig.driver.used(0).len(), 2);
    let fresh = Block::new(rig.file.try_clone().unwrap(), false, Some(limiter(None, bucket(1, 2)))).unwrap();
    let mut restored = rig.driver.restored(Box::new(fresh)).unwrap();
    assert!(restored.transport.wake().unwrap(), "there is something that nobody will tell of");
    restored.kick(0);
    assert_eq!(restored.used(0).len(), 2);
    assert!(!restored.transport.wake().unwrap());
}

/// Else a snapshot taken at this moment, or a pause, would leave a driver that does not tell and a device that does not look.
#[test]
fn an_empty_queue_is_told_of_whatever_the_bucket_holds() {
    let mut rig = limited(None, bucket(1, 2));
    (0..2).for_each(|_| ask(&mut rig));
    rig.driver.kick(0);
    assert_eq!(rig.driver.used(0).len(), 2);
    ask(&mut rig);
    assert!(rig.driver.must_notify(0));
}

#[test]
fn a_reset_or_a_broken_queue_stops_the_timer() {
    for broken in [false, true] {
        let mut rig = limited(None, bucket(1, 1));
        (0..2).for_each(|_| ask(&mut rig));
        rig.driver.kick(0);
        if broken {
            advance(Duration::from_secs(10));
            rig.driver.set_avail_index(0, 1000);
            rig.driver.turn(0);
            assert_eq!(rig.driver.get(reg::VIRTIO_MMIO_STATUS), 15 | NEEDS_RESET);
        } else {
            rig.driver.set(reg::VIRTIO_MMIO_STATUS, 0);
        }
        rig.driver.used(0);
        advance(Duration::from_secs(10));
        assert!(!rig.driver.source(0));
        assert!(rig.driver.used(0).is_empty());
    }
}
