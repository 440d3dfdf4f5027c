//! The node's end of the control socket: packets of JSON, with descriptors.

use std::{
    io::{self, IoSlice, IoSliceMut},
    os::fd::{BorrowedFd, OwnedFd},
};

use serde::{Serialize, de::DeserializeOwned};
use stasis_vmm_api::{MAX_FDS, MAX_PACKET};
use tokio_seqpacket::{
    UnixSeqpacket,
    ancillary::{AncillaryMessageWriter, OwnedAncillaryMessage},
};

/// Room for the control message of [`MAX_FDS`] descriptors: its header, and four bytes each.
const ANCILLARY: usize = 64 + MAX_FDS * 4;

/// Reused between packets.
pub(crate) struct Buffers {
    packet: Vec<u8>,
}

impl Default for Buffers {
    fn default() -> Self {
        Self { packet: vec![0; MAX_PACKET] }
    }
}

pub(crate) async fn send(socket: &UnixSeqpacket, request: &impl Serialize, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let packet = serde_json::to_vec(request)?;
    let mut space = [0; ANCILLARY];
    let mut ancillary = AncillaryMessageWriter::new(&mut space);
    if !files.is_empty() {
        ancillary.add_fds(files)?;
    }
    socket.send_vectored_with_ancillary(&[IoSlice::new(&packet)], &mut ancillary).await?;
    Ok(())
}

/// The next message. `None`: the process is gone. Cancelling it loses nothing: a packet is taken in one piece.
pub(crate) async fn receive<T: DeserializeOwned>(
    socket: &UnixSeqpacket,
    buffers: &mut Buffers,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut space = [0; ANCILLARY];
    let mut parts = [IoSliceMut::new(&mut buffers.packet)];
    let (info, ancillary) = match socket.recv_vectored_with_ancillary(&mut parts, &mut space).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
        other => other?,
    };
    let mut files = Vec::new();
    for message in ancillary.into_messages() {
        if let OwnedAncillaryMessage::FileDescriptors(descriptors) = message {
            files.extend(descriptors);
        }
    }
    let length = info.bytes_read();
    if length == 0 {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&buffers.packet[..length])?, files)))
}
