use proptest::prelude::*;
use virtio_bindings::virtio_mmio as reg;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::virtio::driver::{BUFFERS, Buffer, Driver, MEMORY_MIB, NEEDS_RESET, other_device};

fn driver() -> Driver {
    Driver::live(Box::new(Entropy::new()))
}

fn bytes_at(driver: &Driver, at: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    driver.memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
    bytes
}

#[test]
fn every_request_gets_other_bytes() {
    let mut driver = driver();
    let mut seen = Vec::new();
    for _ in 0..4 {
        driver.add(0, &[Buffer(BUFFERS, 20, true), Buffer(BUFFERS + 0x1000, 12, true)]);
        driver.kick(0);
        assert_eq!(driver.used(0).iter().map(|used| used.1).collect::<Vec<_>>(), [32]);
        assert!(driver.interrupted());
        seen.push([bytes_at(&driver, BUFFERS, 20), bytes_at(&driver, BUFFERS + 0x1000, 12)].concat());
    }
    assert_eq!(bytes_at(&driver, BUFFERS + 20, 8), [0; 8], "nothing beside the buffers is written");
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 4);
}

#[test]
fn a_turn_and_a_request_are_bounded() {
    let mut driver = driver();
    for _ in 0..40 {
        driver.add(0, &[Buffer(BUFFERS, 1 << 20, true)]);
    }
    assert!(driver.turn(0));
    let used = driver.used(0);
    assert_eq!(used.len(), REQUESTS_PER_TURN);
    assert!(used.iter().all(|(_, length)| (1..=4096).contains(length)), "{used:?}");
    driver.kick(0);
    assert_eq!(driver.used(0).len(), 40 - REQUESTS_PER_TURN);
}

#[test]
fn what_cannot_be_written_is_returned_empty_or_breaks_the_device() {
    let mut fine = driver();
    fine.add(0, &[Buffer(BUFFERS, 64, false)]);
    fine.kick(0);
    assert_eq!(fine.used(0)[0].1, 0);
    for (address, length) in [(0x4000_0000, 64), (u64::MAX - 3, 64), ((u64::from(MEMORY_MIB) << 20) - 8, 16)] {
        let mut driver = driver();
        driver.add(0, &[Buffer(address, length, true)]);
        assert!(!driver.turn(0));
        assert_eq!(driver.get(reg::VIRTIO_MMIO_STATUS), 15 | NEEDS_RESET);
    }
}

#[test]
fn a_restored_guest_reads_on() {
    let first = driver();
    let mut restored = first.restored(Box::new(Entropy::new())).unwrap();
    restored.add(0, &[Buffer(BUFFERS, 32, true)]);
    restored.kick(0);
    assert_eq!(restored.used(0).iter().map(|used| used.1).collect::<Vec<_>>(), [32]);
    assert!(first.restored(other_device()).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the descriptors say: no panic, no endless loop.
    #[test]
    fn no_descriptors_do_harm(
        descriptors in proptest::collection::vec((any::<u64>(), any::<u32>(), 0..8u16, 0..300u16), 1..32),
        heads in proptest::collection::vec(0..40u16, 1..64),
        near: bool,
    ) {
        let mut driver = driver();
        for (index, (address, length, flags, next)) in (0..).zip(descriptors) {
            let address = if near { BUFFERS + address % 0x10_0000 } else { address };
            driver.put_descriptor(0, index, address, length, flags, next);
        }
        for head in heads {
            driver.offer(0, head);
        }
        for _ in 0..100 {
            if !driver.turn(0) { break }
        }
    }
}
