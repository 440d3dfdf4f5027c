//! Connections to the function, made without waiting for it to accept.

use std::{
    io,
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrIn, connect, getsockopt, setsockopt, socket,
        sockopt::{SocketError, TcpNoDelay},
    },
};

use crate::forward::Pair;

/// Makes connections to the function's port.
#[derive(Debug)]
pub struct Dialer {
    address: SockaddrIn,
    /// A socket made before the snapshot: the first request after a restore need not wait for one.
    spare: Option<OwnedFd>,
}

impl Dialer {
    /// For a port of 127.0.0.1.
    ///
    /// # Errors
    /// No socket could be made.
    pub fn new(port: u16) -> io::Result<Self> {
        let address = SockaddrIn::from(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port));
        Ok(Self { address, spare: Some(unconnected()?) })
    }

    /// Begins a connection for `client`.
    ///
    /// # Errors
    /// No socket could be made, or the kernel refused at once.
    pub fn dial(&mut self, client: OwnedFd, early: Vec<u8>) -> io::Result<Dialing> {
        let function = match self.spare.take() {
            Some(spare) => spare,
            None => unconnected()?,
        };
        match connect(function.as_raw_fd(), &self.address) {
            Ok(()) | Err(Errno::EINPROGRESS | Errno::EINTR) => Ok(Dialing { client, function, early }),
            Err(errno) => Err(errno.into()),
        }
    }
}

fn unconnected() -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
    setsockopt(&socket, TcpNoDelay, &true)?;
    Ok(socket)
}

/// A connection on its way to the function.
#[derive(Debug)]
pub struct Dialing {
    client: OwnedFd,
    function: OwnedFd,
    early: Vec<u8>,
}

impl Dialing {
    /// What to poll for output.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.function.as_fd()
    }

    /// Once that has reported something: the pair.
    ///
    /// # Errors
    /// The function does not listen.
    pub fn finish(self) -> io::Result<Pair> {
        match getsockopt(&self.function, SocketError)? {
            0 => Ok(Pair::new(self.client, self.function, self.early)),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}
