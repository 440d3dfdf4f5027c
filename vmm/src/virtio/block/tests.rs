mod rate;

use proptest::prelude::*;
use virtio_bindings::virtio_mmio as reg;
use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::virtio::driver::{BUFFERS, Buffer, Driver, MEMORY_MIB, NEEDS_RESET};

const HEADER: u64 = BUFFERS;
pub(super) const DATA: u64 = BUFFERS + 0x1_0000;
const STATUS: u64 = BUFFERS + 0x1000;
pub(super) const OK: u8 = 0;
pub(super) const IOERR: u8 = 1;
pub(super) const UNSUPP: u8 = 2;

pub(super) struct Rig {
    pub(super) driver: Driver,
    pub(super) file: File,
}

impl Rig {
    /// A disk of `sectors`, sector n filled with n + 1.
    pub(super) fn new(sectors: u64, read_only: bool) -> Self {
        Self::with(sectors, read_only, None)
    }

    fn with(sectors: u64, read_only: bool, limiter: Option<Limiter>) -> Self {
        let file = tempfile::tempfile().unwrap();
        for sector in 0..sectors {
            let fill = u8::try_from(sector % 255).unwrap() + 1;
            file.write_all_at(&[fill; 512], sector * 512).unwrap();
        }
        let disk = Block::new(file.try_clone().unwrap(), read_only, limiter).unwrap();
        Self { driver: Driver::live(Box::new(disk)), file }
    }

    pub(super) fn contents(&self) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(self.file.metadata().unwrap().len()).unwrap()];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    pub(super) fn header(&self, kind: u32, sector: u64) -> Buffer {
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.driver.memory.write_slice(&header, GuestAddress(HEADER)).unwrap();
        Buffer(HEADER, 16, false)
    }

    /// One request; the status that the device wrote, and the bytes that it says it wrote.
    pub(super) fn request(&mut self, kind: u32, sector: u64, data: &[Buffer]) -> (u8, u32) {
        self.driver.memory.write_obj(0xaa_u8, GuestAddress(STATUS)).unwrap();
        let chain = [&[self.header(kind, sector)], data, &[Buffer(STATUS, 1, true)]].concat();
        self.driver.add(0, &chain);
        self.driver.kick(0);
        let used = self.driver.used(0);
        assert_eq!(used.len(), 1);
        (self.driver.memory.read_obj(GuestAddress(STATUS)).unwrap(), used[0].1)
    }

    fn memory_at(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.driver.memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
        bytes
    }
}

#[test]
fn reads_into_one_buffer_or_many() {
    let mut rig = Rig::new(8, false);
    assert_eq!(rig.request(VIRTIO_BLK_T_IN, 2, &[Buffer(DATA, 1024, true)]), (OK, 1025));
    assert_eq!(rig.memory_at(DATA, 1024), [[3; 512], [4; 512]].concat());
    let parts: Vec<_> = (0..128).map(|i| Buffer(DATA + 0x2000 + i * 100, 16, true)).collect();
    assert_eq!(rig.request(VIRTIO_BLK_T_IN, 4, &parts), (OK, 2049));
    assert_eq!(rig.memory_at(DATA + 0x2000 + 100 * 127, 17), [&[8; 16][..], &[0]].concat());
    assert!(rig.driver.interrupted());
}

#[test]
fn writes_and_flushes() {
    let mut rig = Rig::new(400, false);
    let sent: Vec<u8> = (0..=255).cycle().take(150 * 1024).collect();
    rig.driver.memory.write_slice(&sent, GuestAddress(DATA)).unwrap();
    let parts = [Buffer(DATA, 100, false), Buffer(DATA + 100, 150 * 1024 - 100, false)];
    assert_eq!(rig.request(VIRTIO_BLK_T_OUT, 1, &parts), (OK, 1));
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1));
    let disk = rig.contents();
    assert!(disk[512..512 + sent.len()] == sent && disk[..512] == [1; 512] && disk[301 * 512] == 47);
}

#[test]
fn says_its_name() {
    let mut rig = Rig::new(1, true);
    assert_eq!(rig.request(VIRTIO_BLK_T_GET_ID, 0, &[Buffer(DATA, 20, true)]), (OK, 21));
    assert_eq!(rig.memory_at(DATA, 8), *b"stasis\0\0");
    assert_eq!(rig.request(VIRTIO_BLK_T_GET_ID, 0, &[Buffer(DATA, 3, true)]), (OK, 4));
}

#[test]
fn what_is_not_wholly_on_the_disk_is_refused() {
    let mut rig = Rig::new(8, false);
    for sector in [8, 7, u64::MAX, u64::MAX / 512, 1 << 55] {
        for (kind, written) in [(VIRTIO_BLK_T_IN, true), (VIRTIO_BLK_T_OUT, false)] {
            assert_eq!(rig.request(kind, sector, &[Buffer(DATA, 1024, written)]).0, IOERR, "{kind} {sector}");
        }
    }
    for length in [1, 511, 513] {
        assert_eq!(rig.request(VIRTIO_BLK_T_IN, 0, &[Buffer(DATA, length, true)]).0, IOERR);
        assert_eq!(rig.request(VIRTIO_BLK_T_OUT, 0, &[Buffer(DATA, length, false)]).0, IOERR);
    }
    assert_eq!(rig.contents(), Rig::new(8, false).contents());
}

#[test]
fn a_read_only_disk_is_not_written() {
    let mut rig = Rig::new(8, true);
    assert_eq!(rig.request(VIRTIO_BLK_T_OUT, 0, &[Buffer(DATA, 512, false)]), (IOERR, 1));
    assert_eq!(rig.request(VIRTIO_BLK_T_FLUSH, 0, &[]).0, OK);
    assert_eq!(rig.contents(), Rig::new(8, true).contents());
}

#[test]
fn unknown_requests_and_short_heads_are_answered() {
    let mut rig = Rig::new(8, false);
    assert_eq!(rig.request(77, 0, &[]).0, UNSUPP);
    rig.driver.add(0, &[Buffer(HEADER, 15, false), Buffer(STATUS, 1, true)]);
    rig.driver.kick(0);
    assert_eq!((rig.driver.used(0).len(), rig.memory_at(STATUS, 1)), (1, vec![IOERR]));
}

#[test]
fn a_request_without_a_status_byte_is_returned_unserved() {
    let mut rig = Rig::new(8, false);
    let header = rig.header(VIRTIO_BLK_T_OUT, 0);
    rig.driver.add(0, &[header, Buffer(DATA, 512, false)]);
    rig.driver.kick(0);
    assert_eq!(rig.driver.used(0), [(0, 0)]);
    assert_eq!(rig.contents(), Rig::new(8, false).contents());
}

#[test]
fn buffers_outside_memory_and_bad_heads_break_the_device() {
    for bad in [Buffer(0x4000_0000, 512, true), Buffer(u64::MAX - 10, 512, true)] {
        let mut rig = Rig::new(8, false);
        let header = rig.header(VIRTIO_BLK_T_IN, 0);
        rig.driver.add(0, &[header, bad, Buffer(STATUS, 1, true)]);
        assert!(!rig.driver.turn(0));
        assert_eq!(rig.driver.get(reg::VIRTIO_MMIO_STATUS), 15 | NEEDS_RESET);
    }
    let mut rig = Rig::new(8, false);
    rig.driver.offer(0, 300);
    assert!(!rig.driver.turn(0));
    assert_eq!(rig.driver.get(reg::VIRTIO_MMIO_STATUS), 15 | NEEDS_RESET);
}

/// A guest can ask for as much as it likes; the event loop gets its turns in between.
#[test]
fn a_turn_is_bounded() {
    let mut rig = Rig::new(8, false);
    let flush = [rig.header(VIRTIO_BLK_T_FLUSH, 0), Buffer(STATUS, 1, true)];
    for _ in 0..128 {
        rig.driver.add(0, &flush);
    }
    assert!(rig.driver.turn(0));
    assert_eq!(rig.driver.used(0).len(), REQUESTS_PER_TURN);
    rig.driver.kick(0);
    assert_eq!(rig.driver.used(0).len(), 128 - REQUESTS_PER_TURN);
    rig.driver.add(0, &flush);
    assert!(rig.driver.must_notify(0), "after the last turn the guest tells of new requests again");

    let mut rig = Rig::new(20 << 11, false); // 20 MiB, read into the same megabyte again and again
    let parts: Vec<_> = (0..20).map(|_| Buffer(DATA, 1 << 20, true)).collect();
    let chain = [&[rig.header(VIRTIO_BLK_T_IN, 0)], &parts[..], &[Buffer(STATUS, 1, true)]].concat();
    for _ in 0..3 {
        rig.driver.add(0, &chain);
    }
    assert!(rig.driver.turn(0));
    assert_eq!(rig.driver.used(0).len(), 1);

    let parts: Vec<_> = (0..60).map(|_| Buffer(DATA, 1 << 20, true)).collect();
    rig.driver.kick(0);
    rig.driver.used(0);
    assert_eq!(rig.request(VIRTIO_BLK_T_IN, 0, &parts), (IOERR, 1), "longer than any driver's request");
}

#[test]
fn only_whole_sectors_make_a_disk() {
    for length in [0, 511, 513] {
        let file = tempfile::tempfile().unwrap();
        file.set_len(length).unwrap();
        assert!(Block::new(file, false, None).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Whatever the descriptors say: no panic, no endless loop, and the disk keeps its size.
    #[test]
    fn no_descriptors_do_harm(
        descriptors in proptest::collection::vec((0..3u8, any::<u64>(), any::<u32>(), 0..8u16, 0..300u16), 1..32),
        heads in proptest::collection::vec(0..40u16, 1..64),
        kinds in proptest::collection::vec(0..15u32, 16),
    ) {
        let mut rig = Rig::new(64, false);
        for (at, kind) in (HEADER..).step_by(64).zip(kinds) {
            let header = [&kind.to_le_bytes()[..], &[0; 4], &u64::from(kind * 7).to_le_bytes()].concat();
            rig.driver.memory.write_slice(&header, GuestAddress(at)).unwrap();
        }
        for (index, (place, address, length, flags, next)) in (0..).zip(descriptors) {
            let (address, length) = match place {
                0 => (address, length),
                1 => (HEADER + address % 16 * 64, 16),
                _ => (address % (u64::from(MEMORY_MIB) << 20), length % 5 * 512 + length % 2),
            };
            rig.driver.put_descriptor(0, index, address, length, flags, next);
        }
        for head in heads {
            rig.driver.offer(0, head);
        }
        for _ in 0..100 {
            if !rig.driver.turn(0) { break }
        }
        prop_assert_eq!(rig.file.metadata().unwrap().len(), 64 * 512);
    }

    /// A request inside the disk writes its own sectors and no others.
    #[test]
    fn a_write_touches_its_own_sectors_alone(sector in 0u64..70, sectors in 0u32..70) {
        let mut rig = Rig::new(64, false);
        let before = rig.contents();
        rig.driver.memory.write_slice(&vec![0xee; 64 * 1024], GuestAddress(DATA)).unwrap();
        let (status, _) = rig.request(VIRTIO_BLK_T_OUT, sector, &[Buffer(DATA, sectors * 512, false)]);
        let fits = sector + u64::from(sectors) <= 64;
        prop_assert_eq!(status, if fits { OK } else { IOERR });
        for (place, (new, old)) in (0u64..).zip(rig.contents().into_iter().zip(before)) {
            let ours = fits && (sector * 512..(sector + u64::from(sectors)) * 512).contains(&place);
            prop_assert_eq!(new, if ours { 0xee } else { old });
        }
    }
}
