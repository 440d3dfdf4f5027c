use std::os::unix::fs::MetadataExt;

use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES};
use virtio_bindings::virtio_mmio as reg;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::virtio::{
    block::tests::{DATA, IOERR, OK, Rig, UNSUPP},
    driver::Buffer,
};

/// One request of these ranges: sector, sectors, flags.
fn clear(rig: &mut Rig, kind: u32, ranges: &[(u64, u32, u32)]) -> u8 {
    let bytes: Vec<u8> = ranges
        .iter()
        .flat_map(|(sector, count, flags)| {
            [&sector.to_le_bytes()[..], &count.to_le_bytes(), &flags.to_le_bytes()].concat()
        })
        .collect();
    rig.driver.memory.write_slice(&bytes, GuestAddress(DATA)).unwrap();
    rig.request(kind, 0, &[Buffer(DATA, u32::try_from(bytes.len()).unwrap(), false)]).0
}

#[test]
fn cleared_sectors_read_as_zero_and_the_others_as_before() {
    for (kind, flags) in [(VIRTIO_BLK_T_DISCARD, 0), (VIRTIO_BLK_T_WRITE_ZEROES, 0), (VIRTIO_BLK_T_WRITE_ZEROES, 1)] {
        let mut rig = Rig::new(400, false);
        let mut expected = rig.contents();
        assert_eq!(clear(&mut rig, kind, &[(3, 2, flags), (16, 200, flags), (399, 1, flags), (400, 0, flags)]), OK);
        for sectors in [3..5, 16..216, 399..400] {
            expected[sectors.start * 512..sectors.end * 512].fill(0);
        }
        assert!(rig.contents() == expected, "{kind} {flags}");
    }
}

#[test]
fn a_discard_frees_the_hosts_blocks_and_zeroing_may_keep_them() {
    let mut rig = Rig::new(2048, false);
    let blocks = |rig: &Rig| rig.file.metadata().unwrap().blocks();
    rig.file.sync_all().unwrap();
    let before = blocks(&rig);
    assert_eq!(clear(&mut rig, VIRTIO_BLK_T_WRITE_ZEROES, &[(0, 1024, 0)]), OK);
    assert_eq!(blocks(&rig), before);
    assert_eq!(clear(&mut rig, VIRTIO_BLK_T_DISCARD, &[(0, 1024, 0)]), OK);
    assert!(blocks(&rig) + 1024 <= before);
}

#[test]
fn what_breaks_the_limits_is_refused_as_a_whole() {
    for kind in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
        let mut rig = Rig::new(64, false);
        let before = rig.contents();
        for bad in [
            (64, 1, 0),
            (63, 2, 0),
            (u64::MAX, 1, 0),
            (u64::MAX / 512, 1, 0),
            (0, u32::MAX, 0),
            (0, MAX_SECTORS + 1, 0),
        ] {
            assert_eq!(clear(&mut rig, kind, &[(0, 8, 0), bad]), IOERR, "{bad:?}");
        }
        for flags in [2, 3, 1 << 31] {
            assert_eq!(clear(&mut rig, kind, &[(0, 8, 0), (8, 8, flags)]), UNSUPP);
        }
        assert_eq!(clear(&mut rig, kind, &[]), IOERR);
        assert_eq!(clear(&mut rig, kind, &[(0, 1, 0); MAX_RANGES + 1]), IOERR);
        assert_eq!(rig.request(kind, 0, &[Buffer(DATA, 15, false)]).0, IOERR);
        assert!(rig.contents() == before);
    }
    let mut rig = Rig::new(64, false);
    assert_eq!(clear(&mut rig, VIRTIO_BLK_T_DISCARD, &[(0, 8, 1)]), UNSUPP, "unmap is a flag of zeroing");
    assert_eq!(clear(&mut rig, VIRTIO_BLK_T_DISCARD, &[(0, 4, 0); MAX_RANGES]), OK);
}

#[test]
fn a_read_only_disk_is_not_cleared() {
    let mut rig = Rig::new(64, true);
    let before = rig.contents();
    assert_eq!(clear(&mut rig, VIRTIO_BLK_T_DISCARD, &[(0, 8, 0)]), IOERR);
    assert_eq!(clear(&mut rig, VIRTIO_BLK_T_WRITE_ZEROES, &[(0, 8, 1)]), IOERR);
    assert!(rig.contents() == before);
}

#[test]
fn the_driver_reads_the_limits() {
    let limits = |read_only| {
        let rig = Rig::new(64, read_only);
        [12, 36, 40, 44, 48, 52].map(|at| rig.driver.get(reg::VIRTIO_MMIO_CONFIG + at))
    };
    assert_eq!(limits(false), [254, MAX_SECTORS, 16, 8, MAX_SECTORS, 16]);
    assert_eq!(limits(true), [254, 0, 0, 0, 0, 0]);
    let rig = Rig::new(64, false);
    let mut byte = [0];
    rig.driver.transport.read(u64::from(reg::VIRTIO_MMIO_CONFIG) + 56, &mut byte);
    assert_eq!(byte, [1]);
}
