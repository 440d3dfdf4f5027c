//! The node's end of the control socket, without a runtime: for measurements and tests. The node itself waits for many at once
//! (`pool/src/vmm.rs`).

use std::{
    collections::VecDeque,
    io::{self, IoSlice, IoSliceMut},
    os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd},
};

use nix::sys::socket::{ControlMessage, MsgFlags, recvmsg, sendmsg};
use serde::{Serialize, de::DeserializeOwned};

use crate::{Event, FromVmm, MAX_PACKET, Reply, Request};

/// A blocking end of a control socket: a packet is one message. Descriptors that are received are closed unseen.
#[derive(Debug)]
pub struct Packets {
    socket: OwnedFd,
    packet: Vec<u8>,
}

impl Packets {
    /// Speaks over `socket`.
    #[must_use]
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket, packet: Vec::new() }
    }

    /// One message, with descriptors.
    ///
    /// # Errors
    /// Where the socket broke, or the process is gone.
    pub fn send(&self, message: &impl Serialize, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let packet = serde_json::to_vec(message)?;
        let fds: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&fds)];
        let rights = if fds.is_empty() { &[][..] } else { &rights };
        sendmsg::<()>(self.socket.as_raw_fd(), &[IoSlice::new(&packet)], rights, MsgFlags::MSG_NOSIGNAL, None)?;
        Ok(())
    }

    /// The next message.
    ///
    /// # Errors
    /// Where the socket broke, the process is gone, or said something else.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        self.packet.resize(MAX_PACKET, 0);
        let mut parts = [IoSliceMut::new(&mut self.packet)];
        let length = recvmsg::<()>(self.socket.as_raw_fd(), &mut parts, None, MsgFlags::empty())?.bytes;
        if length == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the process at the control socket is gone"));
        }
        Ok(serde_json::from_slice(&self.packet[..length])?)
    }
}

/// A blocking client of one VMM process. Descriptors that come with an event are closed unseen.
#[derive(Debug)]
pub struct Client {
    packets: Packets,
    events: VecDeque<Event>,
}

impl Client {
    /// Speaks over `socket`.
    #[must_use]
    pub fn new(socket: OwnedFd) -> Self {
        Self { packets: Packets::new(socket), events: VecDeque::new() }
    }

    /// One request and its answer.
    ///
    /// # Errors
    /// Where the socket broke, or the process is gone.
    pub fn ask(&mut self, request: &Request, files: &[BorrowedFd<'_>]) -> io::Result<Reply> {
        self.send(request, files)?;
        self.reply()
    }

    /// A request whose answer [`Client::reply`] waits for.
    ///
    /// # Errors
    /// Where the socket broke, or the process is gone.
    pub fn send(&self, request: &Request, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.packets.send(request, files)
    }

    /// The next answer; events that come before it are kept.
    ///
    /// # Errors
    /// Where the socket broke, or the process is gone.
    pub fn reply(&mut self) -> io::Result<Reply> {
        loop {
            match self.packets.receive()? {
                FromVmm::Reply(reply) => return Ok(reply),
                FromVmm::Event(event) => self.events.push_back(event),
            }
        }
    }

    /// The next event. An answer that comes before it is an error.
    ///
    /// # Errors
    /// Where the socket broke, the process is gone, or it answered something.
    pub fn event(&mut self) -> io::Result<Event> {
        if let Some(event) = self.events.pop_front() {
            return Ok(event);
        }
        match self.packets.receive()? {
            FromVmm::Event(event) => Ok(event),
            FromVmm::Reply(reply) => Err(io::Error::other(format!("an answer instead of an event: {reply:?}"))),
        }
    }
}
