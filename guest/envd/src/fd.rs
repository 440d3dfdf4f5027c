//! Descriptors of pipes, terminals and watches, read and written without blocking.

use std::{io, os::fd::OwnedFd};

use rustix::io::{Errno, ioctl_fionbio, read, write};
use tokio::io::unix::AsyncFd;

/// One that does not block.
pub(crate) type Fd = AsyncFd<OwnedFd>;

/// Takes it in.
pub(crate) fn take(fd: OwnedFd) -> io::Result<Fd> {
    ioctl_fionbio(&fd, true)?;
    // SAFETY: an `OwnedFd` is open and the same from here until it is dropped, which is when the `AsyncFd` that owns it lets go of it, or after.
    let registered = unsafe { AsyncFd::register(fd) };
    Ok(registered?)
}

/// Some bytes, as soon as there are any; 0 at the end. A terminal without a process at its other side is at its end.
pub(crate) async fn receive(fd: &Fd, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        let mut ready = fd.readable().await?;
        match ready.try_io(|fd| receive_now(fd.get_ref(), buffer)) {
            Ok(read) => return read,
            Err(_would_block) => {}
        }
    }
}

/// What is there now.
pub(crate) fn receive_now(fd: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match read(fd, &mut *buffer) {
            Ok(count) => return Ok(count),
            Err(Errno::INTR) => {}
            Err(Errno::IO) => return Ok(0),
            Err(error) => return Err(error.into()),
        }
    }
}

/// All bytes, as fast as the other side takes them.
pub(crate) async fn send_all(fd: &Fd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let mut ready = fd.writable().await?;
        match ready.try_io(|fd| Ok(write(fd.get_ref(), bytes)?)) {
            Ok(Ok(count)) => bytes = bytes.get(count..).unwrap_or_default(),
            Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(Err(error)) => return Err(error),
            Err(_would_block) => {}
        }
    }
    Ok(())
}
