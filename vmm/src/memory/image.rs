//! Memory written to a snapshot's image.

use std::{fs::File, ops::Range, os::unix::fs::FileExt};

use nix::unistd::{Whence, lseek};
use vm_memory::{Bytes, GuestAddress};

use super::{Flush, GuestMemory, PAGE, punch};
use crate::error::{Error, Host, InGuest};

/// Bytes looked at and written at a time.
const CHUNK: usize = 1 << 20;

/// Writes fresh memory to an image of the same size, which `flush` is of. Pages of zeros become holes. Returns the bytes written.
pub(crate) fn write_image(memory: &File, image: &File, flush: &mut Flush<'_>) -> Result<u64, Error> {
    let size = memory.metadata().host("fstat of guest memory")?.len();
    image.set_len(size).host("ftruncate of the memory image")?;
    let mut buffer = vec![0; CHUNK];
    let (mut position, mut written) = (0, 0);
    while let Some(start) = seek(memory, position, Whence::SeekData)? {
        let end = seek(memory, start, Whence::SeekHole)?.unwrap_or(size);
        position = start;
        while position < end {
            let length = usize::try_from(end - position).unwrap_or(CHUNK).min(CHUNK);
            let chunk = &mut buffer[..length];
            memory.read_exact_at(chunk, position).host("read of guest memory")?;
            for (at, run, is_zero) in runs(chunk, position) {
                if !is_zero {
                    image.write_all_at(run, at).host("write of the memory image")?;
                    flush.wrote(at..at + run.len() as u64)?;
                    written += run.len() as u64;
                }
            }
            position += length as u64;
        }
    }
    Ok(written)
}

/// Makes `image`, a clone of the one that memory was restored from, what memory is now. `changed` are the guest addresses, in whole pages,
/// of all that may differ. Pages of zeros become holes. Returns the bytes written. They go to the disk by `flush`, if there is one.
pub(crate) fn write_changes(
    memory: &GuestMemory,
    changed: &[Range<u64>],
    image: &File,
    mut flush: Option<&mut Flush<'_>>,
) -> Result<u64, Error> {
    let mut buffer = vec![0; CHUNK];
    let mut written = 0;
    for range in changed {
        let mut position = range.start;
        while position < range.end {
            let length = usize::try_from(range.end - position).unwrap_or(CHUNK).min(CHUNK);
            let chunk = &mut buffer[..length];
            memory.read_slice(chunk, GuestAddress(position)).in_guest("a changed page")?;
            for (at, run, is_zero) in runs(chunk, position) {
                if is_zero {
                    punch(image, at, run.len() as u64)?;
                } else {
                    image.write_all_at(run, at).host("write of the memory image")?;
                    if let Some(flush) = &mut flush {
                        flush.wrote(at..at + run.len() as u64)?;
                    }
                    written += run.len() as u64;
                }
            }
            position += length as u64;
        }
    }
    Ok(written)
}

/// The runs of pages in a chunk that are all zero, and those that are not: where, what, whether zero.
fn runs(chunk: &[u8], mut at: u64) -> impl Iterator<Item = (u64, &[u8], bool)> {
    let is_zero = |page: &[u8]| page.iter().all(|byte| *byte == 0);
    let mut rest = chunk;
    std::iter::from_fn(move || {
        let zero = is_zero(rest.chunks(PAGE).next()?);
        let pages = rest.chunks(PAGE).take_while(|page| is_zero(page) == zero);
        let (run, behind) = rest.split_at(pages.map(<[u8]>::len).sum());
        let start = at;
        (rest, at) = (behind, at + run.len() as u64);
        Some((start, run, zero))
    })
}

fn seek(file: &File, from: u64, whence: Whence) -> Result<Option<u64>, Error> {
    let from = i64::try_from(from).map_err(|_| Error::Refused("offset out of range"))?;
    match lseek(file, from, whence) {
        Ok(found) => Ok(u64::try_from(found).ok()),
        Err(nix::errno::Errno::ENXIO) => Ok(None),
        Err(error) => Err(error).host("lseek of guest memory"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Pagemap, Room, discard::Discard, fresh_file};
    use proptest::prelude::*;

    #[test]
    fn an_image_holds_what_was_written_and_holes_elsewhere() {
        let (room, file) = (Room::reserve(8).unwrap(), fresh_file(8).unwrap());
        let memory = room.map_shared(&file).unwrap();
        memory.write_slice(b"first", GuestAddress(0)).unwrap();
        memory.write_slice(b"straddles two pages", GuestAddress(0x40_0000 - 5)).unwrap();
        memory.write_slice(&[0; 4096], GuestAddress(0x10_0000)).unwrap();
        let image = tempfile::tempfile().unwrap();
        assert_eq!(write_image(&file, &image, &mut Flush::of(&image)).unwrap(), 3 * 4096);

        let room = Room::reserve(8).unwrap();
        let restored = room.map_private(&image).unwrap();
        let mut expected = vec![0; 8 << 20];
        memory.read_slice(&mut expected, GuestAddress(0)).unwrap();
        let mut found = vec![1; 8 << 20];
        restored.read_slice(&mut found, GuestAddress(0)).unwrap();
        assert!(expected == found);

        restored.write_slice(b"private", GuestAddress(0)).unwrap();
        let mut byte = [0; 5];
        image.read_exact_at(&mut byte, 0).unwrap();
        assert_eq!(&byte, b"first", "a guest's write never reaches the image");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        /// Whatever was written, zeroed and given up, in whatever order.
        #[test]
        fn a_changed_image_is_what_memory_is(
            steps in proptest::collection::vec((0u8..3, 0u64..2048, 1u64..40, any::<u8>()), 0..60),
        ) {
            const MIB: u32 = 8;
            let base = tempfile::tempfile().unwrap();
            let bytes: Vec<u8> = (0..2048u32).flat_map(|page| [u8::try_from(page % 5).unwrap(); PAGE]).collect();
            base.write_all_at(&bytes, 0).unwrap();
            let room = Room::reserve(MIB).unwrap();
            let memory = room.map_private(&base).unwrap();
            let mut discard = Discard::new(&memory).unwrap();
            for (step, page, count, value) in steps {
                let (at, end) = (page * 4096, ((page + count) * 4096).min(8 << 20));
                let length = usize::try_from(end - at).unwrap();
                match step {
                    0 => memory.write_slice(&vec![value; length], GuestAddress(at)).unwrap(),
                    1 => memory.write_slice(&vec![0; length], GuestAddress(at)).unwrap(),
                    _ => drop(discard.give_up(at..end).unwrap()),
                }
            }
            let mut now = vec![0; 8 << 20];
            memory.read_slice(&mut now, GuestAddress(0)).unwrap();

            let start = room.addresses().start;
            let private = Pagemap::of_this_process().unwrap().private_pages(room.addresses()).unwrap();
            let changed: Vec<_> = private.iter().map(|range| range.start - start..range.end - start).collect();
            let image = tempfile::tempfile().unwrap();
            image.write_all_at(&bytes, 0).unwrap();
            write_changes(&memory, &discard.holes().iter().cloned().collect::<Vec<_>>(), &image, None).unwrap();
            let mut flush = Flush::of(&image);
            write_changes(&memory, &changed, &image, Some(&mut flush)).unwrap();
            flush.push().and_then(|()| flush.finish()).unwrap();
            let mut found = vec![0; 8 << 20];
            image.read_exact_at(&mut found, 0).unwrap();
            prop_assert!(found == now);
        }
    }
}
