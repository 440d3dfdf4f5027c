//! Reading and writing sockets of any family without waiting, and without a system call that would say so.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
};

use nix::{
    errno::Errno,
    sys::socket::{MsgFlags, recv, send},
};

/// Reads what is there: `Some(0)` at the end, `None` if nothing is there now.
///
/// # Errors
/// What the kernel answered.
pub fn receive(from: impl AsFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    later(recv(from.as_fd().as_raw_fd(), buffer, MsgFlags::MSG_DONTWAIT))
}

/// Writes what fits; `None` if nothing fits now.
///
/// # Errors
/// What the kernel answered.
pub fn transmit(to: impl AsFd, bytes: &[u8]) -> io::Result<Option<usize>> {
    later(send(to.as_fd().as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL))
}

/// Writes all of it, waiting where it must.
///
/// # Errors
/// What the kernel answered.
pub fn transmit_all(to: impl AsFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match send(to.as_fd().as_raw_fd(), bytes, MsgFlags::MSG_NOSIGNAL) {
            Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

fn later(result: nix::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}
