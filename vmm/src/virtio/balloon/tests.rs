use std::{fs::File, os::unix::fs::FileExt};

use proptest::prelude::*;
use virtio_bindings::virtio_mmio as reg;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::*;
use crate::{
    memory,
    virtio::driver::{BUFFERS, Buffer, Driver, MEMORY_MIB, NEEDS_RESET, other_device},
};

const MIB: u64 = 1 << 20;
/// The third to eighth MiB are the tests' own; rings and requests are below.
const FREE: u64 = 2 * MIB;

/// A balloon over a booted VM's memory.
fn booted() -> Driver {
    let (memory, _) = memory::fresh(MEMORY_MIB).unwrap();
    memory.write_slice(&vec![0xd1; 6 << 20], GuestAddress(FREE)).unwrap();
    over(memory)
}

/// A balloon over memory restored from an image that is all `0x5e` in the third to eighth MiB.
fn restored() -> (Driver, File) {
    let image = tempfile::tempfile().unwrap();
    image.set_len(u64::from(MEMORY_MIB) * MIB).unwrap();
    image.write_all_at(&vec![0x5e; 6 << 20], FREE).unwrap();
    (over(memory::private(&image, MEMORY_MIB).unwrap()), image)
}

fn over(memory: GuestMemory) -> Driver {
    let balloon = Balloon::new(Discard::new(&memory).unwrap());
    Driver::live_over(Box::new(balloon), memory)
}

fn is_all(driver: &Driver, range: std::ops::Range<u64>, byte: u8) -> bool {
    let mut bytes = vec![0xaa; usize::try_from(range.end - range.start).unwrap()];
    driver.memory.read_slice(&mut bytes, GuestAddress(range.start)).unwrap();
    bytes.iter().all(|found| *found == byte)
}

/// Names pages to a queue. Returns how many requests came back.
fn name(driver: &mut Driver, queue: usize, pages: impl IntoIterator<Item = u64>) -> usize {
    let list: Vec<u8> = pages.into_iter().flat_map(|page| u32::try_from(page).unwrap().to_le_bytes()).collect();
    driver.memory.write_slice(&list, GuestAddress(BUFFERS)).unwrap();
    driver.add(queue, &[Buffer(BUFFERS, u32::try_from(list.len()).unwrap(), false)]);
    driver.kick(queue);
    driver.used(queue).len()
}

#[test]
fn an_inflated_page_is_gone_from_a_booted_vm() {
    let mut driver = booted();
    assert_eq!(name(&mut driver, INFLATE, [512, 514, 513, 700]), 1);
    assert!(driver.interrupted());
    assert!(is_all(&driver, FREE..FREE + 3 * PAGE, 0) && is_all(&driver, 700 * PAGE..701 * PAGE, 0));
    assert!(is_all(&driver, 515 * PAGE..700 * PAGE, 0xd1) && is_all(&driver, 701 * PAGE..8 * MIB, 0xd1));
}

#[test]
fn a_restored_vms_block_goes_when_its_last_page_does() {
    let (mut driver, _) = restored();
    driver.memory.write_slice(&[0xd1; 5 * 4096], GuestAddress(FREE)).unwrap();
    // From the top down, over several requests, as a guest's allocator gives them.
    for page in (513..512 + 40).rev() {
        name(&mut driver, INFLATE, [page]);
    }
    assert!(is_all(&driver, FREE + 16 * PAGE..FREE + 32 * PAGE, 0), "a block of which every page is in");
    assert!(is_all(&driver, FREE + PAGE..FREE + 5 * PAGE, 0xd1), "a block whose first page is not");
    assert!(is_all(&driver, FREE + 32 * PAGE..FREE + 48 * PAGE, 0x5e), "and one whose last pages are not");
    name(&mut driver, DEFLATE, [513]);
    name(&mut driver, INFLATE, [512]);
    assert!(is_all(&driver, FREE..FREE + 5 * PAGE, 0xd1), "a page that was taken out holds its block");
    name(&mut driver, INFLATE, [513, 512]);
    assert!(is_all(&driver, FREE..FREE + 32 * PAGE, 0), "zero, and not the snapshot's bytes");

    // Deflated pages are used again, and given up again.
    name(&mut driver, DEFLATE, 512..528);
    driver.memory.write_slice(&[0xd2; 16 * 4096], GuestAddress(FREE)).unwrap();
    name(&mut driver, INFLATE, 512..528);
    assert!(is_all(&driver, FREE..FREE + 32 * PAGE, 0));
    let holes = driver.transport.device().as_balloon().unwrap().discard().holes().clone();
    assert!(holes.iter().eq([&(FREE..FREE + 32 * PAGE)]));
}

#[test]
fn reported_memory_is_given_up_and_usable_at_once() {
    for (mut driver, old) in [(booted(), 0xd1), (restored().0, 0x5e)] {
        let two = u32::try_from(2 * MIB).unwrap();
        driver.add(REPORTING, &[Buffer(2 * MIB, two, true), Buffer(6 * MIB, two / 2, true)]);
        driver.kick(REPORTING);
        assert_eq!(driver.used(REPORTING).len(), 1);
        assert!(is_all(&driver, 2 * MIB..4 * MIB, 0) && is_all(&driver, 6 * MIB..7 * MIB, 0));
        assert!(is_all(&driver, 4 * MIB..6 * MIB, old) && is_all(&driver, 7 * MIB..8 * MIB, old));
        // A page that was used again since does not go with a neighbour's.
        driver.memory.write_slice(&[0xd2; 4096], GuestAddress(FREE)).unwrap();
        driver.add(REPORTING, &[Buffer(FREE + PAGE, 4096 * 15, true)]);
        driver.kick(REPORTING);
        assert!(is_all(&driver, FREE..FREE + PAGE, 0xd2));
    }
}

#[test]
fn the_target_reaches_the_driver_and_its_answer_the_snapshot() {
    let mut driver = booted();
    let target = |driver: &mut Driver, bytes| {
        driver.transport.configure(|device| device.as_balloon().unwrap().set_target(bytes))
    };
    let generation = driver.get(reg::VIRTIO_MMIO_CONFIG_GENERATION);
    target(&mut driver, 3 * MIB).unwrap();
    assert!(driver.interrupted());
    assert_eq!(driver.get(reg::VIRTIO_MMIO_INTERRUPT_STATUS) & 2, 2, "a change of configuration");
    assert_ne!(driver.get(reg::VIRTIO_MMIO_CONFIG_GENERATION), generation);
    assert_eq!(driver.get(reg::VIRTIO_MMIO_CONFIG), 768);
    for too_much in [8 * MIB, u64::from(u32::MAX) << 20] {
        assert!(target(&mut driver, too_much).is_err());
    }
    driver.set(reg::VIRTIO_MMIO_CONFIG, 1);
    driver.set(reg::VIRTIO_MMIO_CONFIG + 4, 77);
    driver.set(reg::VIRTIO_MMIO_CONFIG + 8, 78);
    driver.transport.write(u64::from(reg::VIRTIO_MMIO_CONFIG) + 6, &[1; 4]);
    driver.transport.write(u64::MAX, &[1; 4]);
    let sizes = |driver: &Driver| [0, 4, 8].map(|at| driver.get(reg::VIRTIO_MMIO_CONFIG + at));
    assert_eq!(sizes(&driver), [768, 77, 0], "the driver writes what is its own to write");

    let same = |driver: &Driver| Box::new(Balloon::new(Discard::new(&driver.memory).unwrap()));
    let again = driver.restored(same(&driver)).unwrap();
    assert_eq!(sizes(&again), [768, 77, 0]);
    assert!(driver.restored(other_device()).is_err());
    let (small, _) = memory::fresh(2).unwrap();
    let smaller = driver.restored(Box::new(Balloon::new(Discard::new(&small).unwrap())));
    assert!(smaller.is_err(), "a balloon larger than the memory");
}

#[test]
fn a_guest_that_names_what_it_does_not_have_loses_the_device() {
    let pages = u64::from(MEMORY_MIB) * MIB / PAGE;
    for queue in [INFLATE, DEFLATE] {
        for page in [pages, u64::from(u32::MAX)] {
            let mut driver = booted();
            assert_eq!(name(&mut driver, queue, [512, page]), 0);
            assert_eq!(driver.get(reg::VIRTIO_MMIO_STATUS), 15 | NEEDS_RESET);
            assert!(is_all(&driver, FREE..8 * MIB, 0xd1), "not even its good half is taken");
        }
        let mut driver = booted();
        driver.add(queue, &[Buffer(BUFFERS, 4 * 16 * 1024 + 4, false)]);
        assert!(!driver.turn(queue));
        assert_eq!(driver.get(reg::VIRTIO_MMIO_STATUS), 15 | NEEDS_RESET, "more than any driver names at once");
    }
    let all = u32::try_from(8 * MIB).unwrap();
    let reports: [&[Buffer]; 4] = [
        &[Buffer(8 * MIB, 4096, true)],
        &[Buffer(4096, all, true)],
        &[Buffer(FREE, 4096, true), Buffer(u64::MAX - 4095, 8192, true)],
        &[Buffer(0, all, true), Buffer(0, 4096, true)],
    ];
    for report in reports {
        let mut driver = booted();
        driver.add(REPORTING, report);
        assert!(!driver.turn(REPORTING));
        assert_eq!(driver.get(reg::VIRTIO_MMIO_STATUS), 15 | NEEDS_RESET, "{report:?}");
        assert!(is_all(&driver, FREE..8 * MIB, 0xd1));
    }
}

#[test]
fn a_reset_empties_the_balloon() {
    let (mut driver, _) = restored();
    name(&mut driver, INFLATE, 512..527);
    driver.set(reg::VIRTIO_MMIO_STATUS, 0);
    driver.power_on();
    name(&mut driver, INFLATE, [527]);
    assert!(is_all(&driver, FREE..FREE + 16 * PAGE, 0x5e), "the new driver has put in one page alone");
}

#[test]
fn a_turn_is_bounded() {
    let mut driver = booted();
    for _ in 0..40 {
        driver.add(INFLATE, &[Buffer(FREE, 0, false)]);
    }
    assert!(driver.turn(INFLATE));
    assert_eq!(driver.used(INFLATE).len(), REQUESTS_PER_TURN);
    driver.kick(INFLATE);
    assert_eq!(driver.used(INFLATE).len(), 40 - REQUESTS_PER_TURN);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is named: what is not zero afterwards is what the guest wrote last, and never the snapshot's.
    #[test]
    fn nothing_is_ever_the_snapshots_again(
        steps in proptest::collection::vec((0..3usize, 512..2048u64, 1..80u64), 1..40),
    ) {
        let (mut driver, _) = restored();
        driver.memory.write_slice(&vec![0xd1; 6 << 20], GuestAddress(FREE)).unwrap();
        for (queue, page, count) in steps {
            let pages = page..(page + count).min(2048);
            if queue == REPORTING {
                let length = u32::try_from((pages.end - pages.start) * PAGE).unwrap();
                driver.add(REPORTING, &[Buffer(page * PAGE, length, true)]);
                driver.kick(REPORTING);
                prop_assert_eq!(driver.used(REPORTING).len(), 1);
            } else {
                prop_assert_eq!(name(&mut driver, queue, pages), 1);
            }
        }
        let mut bytes = vec![0; 6 << 20];
        driver.memory.read_slice(&mut bytes, GuestAddress(FREE)).unwrap();
        prop_assert!(bytes.iter().all(|byte| [0, 0xd1].contains(byte)));
    }

    /// Whatever the descriptors say: no panic, no endless loop, and memory is as large as it was.
    #[test]
    fn no_descriptors_do_harm(
        descriptors in proptest::collection::vec((any::<u64>(), any::<u32>(), 0..8u16, 0..300u16), 1..32),
        heads in proptest::collection::vec(0..40u16, 1..64),
        queue in 0..3usize,
        near: bool,
    ) {
        let mut driver = booted();
        for (index, (address, length, flags, next)) in (0..).zip(descriptors) {
            let (address, length) = if near { (FREE + address % (6 * MIB), length % 0x2_0000) } else { (address, length) };
            driver.put_descriptor(queue, index, address, length, flags, next);
        }
        for head in heads {
            driver.offer(queue, head);
        }
        for _ in 0..100 {
            if !driver.turn(queue) { break }
        }
        driver.memory.read_obj::<u8>(GuestAddress(u64::from(MEMORY_MIB) * MIB - 1)).unwrap();
        prop_assert_eq!(driver.memory.num_regions(), 1);
    }
}
