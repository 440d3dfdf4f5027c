use proptest::prelude::*;
use virtio_bindings::virtio_mmio as reg;

use super::*;
use crate::virtio::{
    block::Block,
    driver::{BUFFERS, Buffer, DRIVER_OK, Driver, FEATURES, FEATURES_OK, NEEDS_RESET, ring_of},
};

const STATUS: u32 = reg::VIRTIO_MMIO_STATUS;

fn disk(sectors: u64) -> Box<Block> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(sectors * 512).unwrap();
    Box::new(Block::new(file, false, None).unwrap())
}

#[test]
fn it_says_what_it_is() {
    let driver = Driver::cold(disk(8));
    let seen = [reg::VIRTIO_MMIO_MAGIC_VALUE, reg::VIRTIO_MMIO_VERSION, reg::VIRTIO_MMIO_DEVICE_ID]
        .map(|register| driver.get(register));
    assert_eq!(seen, [0x7472_6976, 2, 2]);
    assert_eq!(driver.get(reg::VIRTIO_MMIO_QUEUE_NUM_MAX), 256);
    assert_eq!(driver.get(reg::VIRTIO_MMIO_SHM_LEN_LOW), u32::MAX, "there is no shared memory");
    assert_eq!(driver.get(reg::VIRTIO_MMIO_CONFIG), 8, "the disk's sectors");
}

#[test]
fn features_are_offered_in_halves_and_frozen_once_accepted() {
    let mut driver = Driver::cold(disk(8));
    for (select, word) in [(0, 1 << 29 | 1 << 14 | 1 << 13 | 1 << 9 | 1 << 2), (1, 1), (2, 0)] {
        driver.set(reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, select);
        assert_eq!(driver.get(reg::VIRTIO_MMIO_DEVICE_FEATURES), word);
    }
    driver.negotiate(FEATURES);
    assert_eq!(driver.get(STATUS), 3 | FEATURES_OK);
    driver.set(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, 0);
    driver.set(reg::VIRTIO_MMIO_DRIVER_FEATURES, 0);
    assert_eq!(driver.transport.registers.driver_features, 1 << 32 | 1 << 29);
}

#[test]
fn features_that_were_not_offered_or_a_legacy_driver_are_not_accepted() {
    for features in [[1 << 29, 0], [1 << 5, 1], [0, 3]] {
        let mut driver = Driver::cold(disk(8));
        driver.negotiate(features);
        assert_eq!(driver.get(STATUS), 3, "{features:?}");
        driver.set(STATUS, 3 | FEATURES_OK | DRIVER_OK);
        assert_eq!(driver.get(STATUS), 3, "no driver without features");
    }
}

#[test]
fn status_bits_are_taken_back_by_a_reset_alone() {
    let mut driver = Driver::live(disk(8));
    driver.set(STATUS, 3);
    assert_eq!(driver.get(STATUS), 15, "the driver cannot thaw its queues");
    driver.set(STATUS, NEEDS_RESET);
    assert_eq!(driver.get(STATUS), 15, "that bit is the device's");
    driver.set(STATUS, 0);
    assert_eq!((driver.get(STATUS), driver.get(reg::VIRTIO_MMIO_QUEUE_READY)), (0, 0));
    assert_eq!(driver.transport.registers, Registers::default());
}

#[test]
fn queues_are_frozen_once_the_driver_is_ready() {
    let mut driver = Driver::live(disk(8));
    let before = driver.transport.queues[0].state();
    driver.set_up(0, 0x5_0000);
    driver.set(reg::VIRTIO_MMIO_QUEUE_READY, 0);
    driver.set(reg::VIRTIO_MMIO_QUEUE_NUM, 16);
    assert_eq!(driver.transport.queues[0].state(), before);
}

#[test]
fn event_idx_holds_whenever_the_features_came() {
    let mut driver = Driver::cold(disk(8));
    driver.set_up(0, ring_of(0)); // before the features
    driver.negotiate(FEATURES);
    driver.set(STATUS, 15);
    assert!(driver.transport.queues[0].event_idx_enabled());
}

#[test]
fn a_queue_outside_memory_breaks_the_device_and_nothing_else() {
    for at in [0x800_0000, 0xffff_ffff_ffff_0000, 0x7f_f000] {
        let mut driver = Driver::cold(disk(8));
        driver.negotiate(FEATURES);
        driver.set_up(0, at);
        driver.set(STATUS, 15);
        assert_eq!(driver.get(STATUS), 15 | NEEDS_RESET, "{at:#x}");
        assert!(driver.interrupted() && driver.get(reg::VIRTIO_MMIO_INTERRUPT_STATUS) == INTERRUPT_CONFIG);
        assert!(!driver.turn(0));
    }
}

#[test]
fn a_queue_that_is_not_ready_or_at_no_address_is_no_endless_work() {
    let mut driver = Driver::cold(disk(8));
    driver.negotiate(FEATURES);
    driver.set(STATUS, 15);
    driver.set_avail_index(0, 5);
    assert!(!driver.turn(0), "not ready: nothing to do");

    let mut driver = Driver::cold(disk(8));
    driver.negotiate(FEATURES);
    driver.set(reg::VIRTIO_MMIO_QUEUE_READY, 1); // all addresses 0
    driver.set(STATUS, 15);
    assert!(!driver.turn(0));
    assert_eq!(driver.get(STATUS), 15 | NEEDS_RESET);
}

#[test]
fn an_index_that_runs_away_breaks_the_device() {
    let mut driver = Driver::live(disk(8));
    driver.set_avail_index(0, 257);
    assert!(!driver.turn(0));
    assert_eq!(driver.get(STATUS), 15 | NEEDS_RESET);
    driver.set(STATUS, 0);
    assert_eq!(driver.get(STATUS), 0, "and a reset mends it");
}

#[test]
fn interrupts_are_acknowledged_bit_by_bit() {
    let mut driver = Driver::live(disk(8));
    driver.add(0, &[Buffer(BUFFERS, 16, false), Buffer(BUFFERS + 4096, 512, true), Buffer(BUFFERS + 8192, 1, true)]);
    driver.kick(0);
    assert!(driver.interrupted());
    driver.set(reg::VIRTIO_MMIO_INTERRUPT_ACK, INTERRUPT_CONFIG);
    assert_eq!(driver.get(reg::VIRTIO_MMIO_INTERRUPT_STATUS), INTERRUPT_USED);
    driver.set(reg::VIRTIO_MMIO_INTERRUPT_ACK, INTERRUPT_USED);
    assert_eq!(driver.get(reg::VIRTIO_MMIO_INTERRUPT_STATUS), 0);
}

#[test]
fn a_restored_device_goes_on() {
    let read = [Buffer(BUFFERS, 16, false), Buffer(BUFFERS + 4096, 512, true), Buffer(BUFFERS + 8192, 1, true)];
    let mut driver = Driver::live(disk(8));
    driver.add(0, &read);
    driver.kick(0);
    let mut restored = driver.restored(disk(8)).unwrap();
    assert!(restored.interrupted(), "an interrupt that was not acknowledged is raised again");
    assert_eq!(restored.used(0), [(0, 513)]);
    restored.set(reg::VIRTIO_MMIO_INTERRUPT_ACK, INTERRUPT_USED);
    restored.add(0, &read);
    restored.kick(0);
    assert_eq!(restored.used(0), [(3, 513)]);
    restored.set(reg::VIRTIO_MMIO_INTERRUPT_ACK, INTERRUPT_USED);
    restored.interrupted();
    let again = restored.restored(disk(8)).unwrap();
    assert!(!again.interrupted(), "one that was is not");
}

#[test]
fn states_that_do_not_fit_are_refused() {
    let mut driver = Driver::live(disk(8));
    assert!(driver.restored(disk(16)).is_err(), "another disk");
    let good = driver.transport.save().unwrap();
    let damage: [fn(&mut TransportState); 11] = [
        |state| state.queues[0].max_size = 128,
        |state| state.queues[0].max_size = 0,
        |state| state.queues[0].size = 3,
        |state| state.queues[0].size = 512,
        |state| state.queues[0].desc_table = 1 << 40,
        |state| state.queues[0].avail_ring = u64::MAX - 1,
        |state| state.queues[0].used_ring = 2,
        |state| state.queues[0].next_avail = 1,
        |state| state.queues[0].next_used = 1,
        |state| state.registers.driver_features |= 1 << 40,
        |state| state.queues.clear(),
    ];
    for (index, damage) in damage.into_iter().enumerate() {
        let mut state = good.clone();
        damage(&mut state);
        assert!(matches!(driver.transport.restore(&state), Err(Error::Snapshot(_))), "{index}");
    }
    driver.transport.restore(&good).unwrap();
}

proptest! {
    #[test]
    fn no_access_to_the_registers_panics(
        accesses in proptest::collection::vec((0u64..0x1010, proptest::collection::vec(any::<u8>(), 0..9), any::<bool>(), any::<bool>()), 0..200),
        live: bool,
    ) {
        let mut driver = if live { Driver::live(disk(8)) } else { Driver::cold(disk(8)) };
        for (offset, mut data, write, word) in accesses {
            let offset = if word { (offset % 0x110) & !3 } else { offset };
            if word { data.resize(4, 0) }
            if write { driver.transport.write(offset, &data) } else { driver.transport.read(offset, &mut data) }
            let _ = driver.transport.notified(0).unwrap();
        }
        let _ = driver.transport.save().unwrap();
    }
}
