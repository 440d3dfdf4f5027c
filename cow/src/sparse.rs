//! Reading a file without reading its holes, and telling zeros.

use std::{fs::File, io, os::unix::fs::FileExt};

use rustix::{fs::SeekFrom, io::Errno};

/// Bytes read at a time; a multiple of every granule.
const CHUNK: u64 = 1 << 20;

/// Hands out all of `file` that is not a hole, in order: offset and bytes, at most a MiB at a time, each beginning at a multiple of
/// `granule` and, but for the file's end, whole granules long. Returns the file's length. Moves the file's position.
pub(crate) fn for_each_data(
    file: &File,
    granule: u64,
    mut each: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<u64> {
    let total = file.metadata()?.len();
    let mut buffer = vec![0; usize::try_from(CHUNK).unwrap_or(usize::MAX)];
    let mut at = 0;
    while at < total {
        let Some(data) = next(file, SeekFrom::Data(at))? else { break };
        let end = next(file, SeekFrom::Hole(data))?.unwrap_or(total).next_multiple_of(granule).min(total);
        at = at.max(data - data % granule);
        while at < end {
            let wanted = usize::try_from((end - at).min(CHUNK)).unwrap_or(usize::MAX);
            file.read_exact_at(&mut buffer[..wanted], at)?;
            each(at, &buffer[..wanted])?;
            at += wanted as u64;
        }
    }
    Ok(total)
}

fn next(file: &File, from: SeekFrom) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, from) {
        Ok(found) => Ok(Some(found)),
        // Only a hole is left.
        Err(Errno::NXIO) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether all bytes are zero. By words, which the compiler turns into vectors.
pub(crate) fn is_zero(block: &[u8]) -> bool {
    let (words, rest) = block.as_chunks::<8>();
    words.chunks(64).all(|words| words.iter().fold(0, |seen, word| seen | u64::from_ne_bytes(*word)) == 0)
        && rest.iter().all(|byte| *byte == 0)
}
