//! The VMM's end of the control socket: packets of JSON, with descriptors.

use std::{
    fs::File,
    io::{IoSlice, IoSliceMut},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
};

use nix::{
    cmsg_space,
    errno::Errno,
    sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, getsockopt, recvmsg, sendmsg, sockopt::SockType},
};
use serde::{Serialize, de::DeserializeOwned};
use stasis_vmm_api::{CONTROL_FD, FromVmm, MAX_FDS, MAX_PACKET, Request};

use crate::error::Error;

/// The control socket that the node passed to this process.
///
/// # Errors
/// [`Error::Control`] where the process was started by hand and there is none.
pub fn control_socket() -> Result<OwnedFd, Error> {
    // SAFETY: nothing in this process has opened or taken this number yet: it is called once, first of all, and nobody reads a standard input.
    let socket = unsafe { OwnedFd::from_raw_fd(CONTROL_FD) };
    match getsockopt(&socket, SockType) {
        Ok(nix::sys::socket::SockType::SeqPacket) => Ok(socket),
        _ => {
            // Not ours to close, whatever it is.
            let _ = socket.into_raw_fd();
            Err(Error::Control(format!(
                "descriptor {CONTROL_FD} is not one: `stasis vmm` is started by the node, not by hand"
            )))
        }
    }
}

/// The control socket of a VMM process.
pub(crate) struct Control {
    socket: OwnedFd,
    /// Room for a packet, of which the process only has what packets have filled: made anew for each, it would be mapped and unmapped in the
    /// middle of a claim. It is the first of its size: after one that was freed the allocator would no longer map it, but clear memory for it.
    packet: Vec<u8>,
}

/// A message and the files that came with it, in order.
pub(crate) struct Received<T = Request> {
    pub(crate) request: T,
    pub(crate) files: Vec<File>,
}

/// What a look at a socket finds.
pub(crate) enum Next<T = Request> {
    Request(Received<T>),
    Nothing,
    /// Whoever is at the other end has closed it.
    Gone,
}

impl Control {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, packet: vec![0; MAX_PACKET] }
    }

    /// The next packet, if there is one.
    pub(crate) fn receive_next(&mut self) -> Result<Next, Error> {
        receive_into(self.socket.as_fd(), &mut self.packet, MsgFlags::MSG_DONTWAIT)
    }

    /// Sends one packet, with the descriptors that the message carries.
    pub(crate) fn send(&self, message: &FromVmm, with: &[BorrowedFd<'_>]) -> Result<Sent, Error> {
        try_send(self.socket.as_fd(), message, with)
    }
}

/// What became of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    Whole,
    /// Whoever is at the other end is gone.
    Gone,
}

/// Waits for one packet, for which there is this room. `None`: whoever is at the other end is gone.
pub(crate) fn receive<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
    packet: &mut [u8],
) -> Result<Option<Received<T>>, Error> {
    match receive_into(socket, packet, MsgFlags::empty())? {
        Next::Request(received) => Ok(Some(received)),
        Next::Nothing | Next::Gone => Ok(None),
    }
}

fn receive_into<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
    packet: &mut [u8],
    flags: MsgFlags,
) -> Result<Next<T>, Error> {
    let mut space = cmsg_space!([RawFd; MAX_FDS]);
    let mut parts = [IoSliceMut::new(packet)];
    let flags = flags | MsgFlags::MSG_CMSG_CLOEXEC;
    let message = loop {
        match recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), flags) {
            Ok(message) => break message,
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => return Ok(Next::Nothing),
            Err(Errno::ECONNRESET) => return Ok(Next::Gone), // gone, with something of ours unread
            Err(error) => return Err(Error::Control(error.to_string())),
        }
    };
    let mut files = Vec::new();
    for control in message.cmsgs().map_err(|error| Error::Control(error.to_string()))? {
        if let ControlMessageOwned::ScmRights(descriptors) = control {
            // SAFETY: the kernel has just installed these descriptors for this message; nothing else owns them.
            files.extend(descriptors.into_iter().map(|fd| unsafe { File::from_raw_fd(fd) }));
        }
    }
    let (length, flags) = (message.bytes, message.flags);
    if length == 0 {
        return Ok(Next::Gone);
    }
    if flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
        return Err(Error::Control("a packet was cut".into()));
    }
    let request = serde_json::from_slice(&packet[..length]).map_err(|error| Error::Control(error.to_string()))?;
    Ok(Next::Request(Received { request, files }))
}

/// Sends one packet, with a descriptor if the message carries one, to somebody who must be there.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    message: &impl Serialize,
    with: Option<BorrowedFd<'_>>,
) -> Result<(), Error> {
    match try_send(socket, message, with.as_slice())? {
        Sent::Whole => Ok(()),
        Sent::Gone => Err(Error::Control("nobody is at the other end".into())),
    }
}

fn try_send(socket: BorrowedFd<'_>, message: &impl Serialize, with: &[BorrowedFd<'_>]) -> Result<Sent, Error> {
    let packet = serde_json::to_vec(message).map_err(|error| Error::Control(error.to_string()))?;
    let raw: Vec<_> = with.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let controls: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
    match sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(&packet)], controls, MsgFlags::MSG_NOSIGNAL, None) {
        Ok(_) => Ok(Sent::Whole),
        Err(Errno::EPIPE | Errno::ECONNRESET) => Ok(Sent::Gone),
        Err(error) => Err(Error::Control(error.to_string())),
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
