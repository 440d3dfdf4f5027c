//! Bytes on their way to the disk while more are copied.

use std::{fs::File, io, ops::Range, os::fd::AsRawFd};

use crate::error::{Error, Host};

/// Bytes after which the disk is given work.
const ENOUGH: u64 = 1 << 20;

/// A file that is written from its start on, in pieces. What has been written is on its way to the disk soon, and there after
/// [`Flush::finish`].
pub(crate) struct Flush<'a> {
    file: &'a File,
    /// Where something was written that the disk has not been asked for.
    begun: Range<u64>,
    bytes: u64,
}

impl<'a> Flush<'a> {
    pub(crate) fn of(file: &'a File) -> Self {
        Self { file, begun: 0..0, bytes: 0 }
    }

    /// This was written.
    pub(crate) fn wrote(&mut self, range: Range<u64>) -> Result<(), Error> {
        let start = if self.bytes == 0 { range.start } else { self.begun.start.min(range.start) };
        self.begun = start..self.begun.end.max(range.end);
        self.bytes += range.end - range.start;
        if self.bytes >= ENOUGH { self.push() } else { Ok(()) }
    }

    /// Has the disk begin with all of it.
    pub(crate) fn push(&mut self) -> Result<(), Error> {
        let Range { start, end } = std::mem::take(&mut self.begun);
        self.bytes = 0;
        let (Ok(from), Ok(length)) = (i64::try_from(start), i64::try_from(end - start)) else {
            return Err(Error::Refused("offset out of range"));
        };
        if length == 0 {
            return Ok(());
        }
        // SAFETY: the call takes numbers only; the descriptor is open as long as the file is borrowed.
        let result = unsafe { libc::sync_file_range(self.file.as_raw_fd(), from, length, libc::SYNC_FILE_RANGE_WRITE) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()).host("sync_file_range of a snapshot") }
    }

    /// Waits until all of it is on the disk.
    pub(crate) fn finish(self) -> Result<(), Error> {
        self.file.sync_data().host("fdatasync of a snapshot")
    }
}
