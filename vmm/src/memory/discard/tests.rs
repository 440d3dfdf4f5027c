use std::{fs::File, os::unix::fs::FileExt};

use vm_memory::{Bytes, GuestAddress};

use super::*;
use crate::memory::{fresh, private};

const MIB: u64 = 1 << 20;

/// Memory restored from an image that is all `0x5e`.
fn restored(mib: u32) -> (GuestMemory, File) {
    let image = tempfile::tempfile().unwrap();
    image.write_all_at(&vec![0x5e; (mib as usize) << 20], 0).unwrap();
    (private(&image, mib).unwrap(), image)
}

fn bytes(memory: &GuestMemory, range: Range<u64>) -> Vec<u8> {
    let mut bytes = vec![0xaa; usize::try_from(range.end - range.start).unwrap()];
    memory.read_slice(&mut bytes, GuestAddress(range.start)).unwrap();
    bytes
}

fn is_all(memory: &GuestMemory, range: Range<u64>, byte: u8) -> bool {
    bytes(memory, range).iter().all(|found| *found == byte)
}

/// Resident bytes of the memory's mappings, and how many mappings there are.
fn resident(memory: &GuestMemory) -> (u64, usize) {
    let region = memory.iter().next().unwrap();
    let (start, size) = (region.get_mmap().as_ptr() as u64, region.len());
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut bytes, mut mappings) = (false, 0, 0);
    for line in smaps.lines() {
        let first = line.split(' ').next().unwrap();
        if let Some((from, _)) = first.split_once('-').filter(|_| !first.ends_with(':')) {
            let from = u64::from_str_radix(from, 16).unwrap();
            inside = (start..start + size).contains(&from);
            mappings += usize::from(inside);
        } else if inside && first == "Rss:" {
            bytes += line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10;
        }
    }
    (bytes, mappings)
}

#[test]
fn private_memory_reads_as_zero_and_never_as_the_snapshot() {
    let (memory, image) = restored(8);
    let mut discard = Discard::new(&memory).unwrap();
    memory.write_slice(&vec![0xd1; 4 << 20], GuestAddress(MIB)).unwrap(); // dirty
    assert!(is_all(&memory, 6 * MIB..8 * MIB, 0x5e)); // clean, and mapped
    let before = resident(&memory).0;
    assert_eq!(discard.give_up(2 * MIB..7 * MIB).unwrap(), 5 * MIB);
    assert!(resident(&memory).0 + 4 * MIB <= before, "{before} {:?}", resident(&memory));
    assert!(is_all(&memory, 2 * MIB..7 * MIB, 0));
    assert!(is_all(&memory, MIB..2 * MIB, 0xd1) && is_all(&memory, 7 * MIB..8 * MIB, 0x5e), "the rest is as it was");
    assert!(is_all(&memory, 0..MIB, 0x5e));

    // Given up once more, after use: the second time is another way to the same.
    memory.write_slice(&vec![0xd2; 5 << 20], GuestAddress(2 * MIB)).unwrap();
    let before = resident(&memory).0;
    assert_eq!(discard.give_up(MIB..8 * MIB).unwrap(), 7 * MIB);
    assert!(resident(&memory).0 + 6 * MIB <= before);
    assert!(is_all(&memory, MIB..8 * MIB, 0) && is_all(&memory, 0..MIB, 0x5e));
    assert!(discard.holes().iter().eq([&(MIB..8 * MIB)]));
    let mut byte = [0];
    image.read_exact_at(&mut byte, 3 * MIB).unwrap();
    assert_eq!(byte, [0x5e], "the image is nobody's to write");
}

#[test]
fn a_rewind_puts_the_image_back() {
    let (memory, _) = restored(8);
    let mut discard = Discard::new(&memory).unwrap();
    for hole in [0..MIB, 3 * MIB..4 * MIB, 7 * MIB..8 * MIB] {
        discard.give_up(hole.clone()).unwrap();
        memory.write_slice(&[0xd1; 4096], GuestAddress(hole.start)).unwrap();
    }
    discard.fill_holes().unwrap();
    assert_eq!(discard.holes().len(), 0);
    assert!(is_all(&memory, 0..8 * MIB, 0x5e));
    discard.give_up(0..8 * MIB).unwrap();
    assert!(is_all(&memory, 0..8 * MIB, 0), "and what is given up after it is a hole again");
}

#[test]
fn shared_memory_becomes_a_hole_in_its_file() {
    use std::os::unix::fs::MetadataExt;
    let (memory, file) = fresh(8).unwrap();
    let mut discard = Discard::new(&memory).unwrap();
    memory.write_slice(&vec![0xd1; 8 << 20], GuestAddress(0)).unwrap();
    let allocated = || file.metadata().unwrap().blocks() * 512;
    assert_eq!(allocated(), 8 * MIB);
    assert_eq!(discard.give_up(4096..8192).unwrap(), 4096, "page by page");
    assert_eq!(discard.give_up(2 * MIB + 1..3 * MIB).unwrap(), MIB - 4096);
    assert_eq!(allocated(), 7 * MIB);
    assert_eq!(resident(&memory).0, 7 * MIB);
    assert!(is_all(&memory, 4096..8192, 0) && is_all(&memory, 2 * MIB + 4096..3 * MIB, 0));
    assert!(is_all(&memory, 0..4096, 0xd1) && is_all(&memory, 8192..2 * MIB + 4096, 0xd1));
    assert_eq!(discard.holes().len(), 0, "the mapping is in one piece");
}

#[test]
fn less_than_a_block_and_what_is_not_there_are_left_alone() {
    let (memory, _) = restored(8);
    let mut discard = Discard::new(&memory).unwrap();
    for small in [0..0, 0..4096, 1..BLOCK, 4096..BLOCK + 4096, 8 * MIB - 4096..8 * MIB] {
        assert_eq!(discard.give_up(small).unwrap(), 0);
    }
    assert_eq!(discard.give_up(BLOCK - 1..3 * BLOCK + 17).unwrap(), 2 * BLOCK);
    assert!(is_all(&memory, 0..BLOCK, 0x5e) && is_all(&memory, 3 * BLOCK..8 * MIB, 0x5e));
    for outside in [0..8 * MIB + 1, 8 * MIB..9 * MIB, u64::MAX - 1..u64::MAX, Range { start: MIB, end: 0 }] {
        assert!(discard.give_up(outside).is_err());
    }
}

#[test]
fn mappings_are_bounded() {
    let image = tempfile::tempfile().unwrap();
    image.set_len(1024 * MIB).unwrap();
    image.write_all_at(&vec![0x5e; 1 << 20], 1023 * MIB).unwrap();
    let memory = private(&image, 1024).unwrap();
    let mut discard = Discard::new(&memory).unwrap();
    let mut given_up = 0;
    for at in (0..1024 * MIB).step_by(2 * usize::try_from(BLOCK).unwrap()) {
        given_up += discard.give_up(at..at + BLOCK).unwrap();
    }
    assert_eq!((discard.holes().len(), given_up), (MAX_HOLES, MAX_HOLES as u64 * BLOCK));
    assert!(resident(&memory).1 <= 2 * MAX_HOLES + 1);
    assert!(is_all(&memory, 1023 * MIB..1024 * MIB, 0x5e), "what would be a hole too many stays as it is");
    // The rest of it makes no further hole, so it can be given up.
    assert_eq!(discard.give_up(0..1024 * MIB).unwrap(), 1024 * MIB);
    assert_eq!(discard.holes().len(), 1);
    assert!(is_all(&memory, 1023 * MIB..1024 * MIB, 0));
}
