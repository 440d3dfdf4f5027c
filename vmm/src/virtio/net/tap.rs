//! The host's end of the wire: a TAP interface whose frames carry virtio-net's header.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_GUEST_UFO, VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6,
    VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_UFO,
    VIRTIO_NET_F_HOST_USO,
};

use super::HEADER;
use crate::error::{Error, Host};

/// What every kernel's TAP can spare the guest.
const BASIC: u32 = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN | libc::TUN_F_UFO;
/// What those since Linux 6.2 can; one without the other is refused.
const USO: u32 = libc::TUN_F_USO4 | libc::TUN_F_USO6;

/// An open TAP interface.
pub(super) struct Tap {
    file: File,
    /// Offloads that its kernel knows.
    knows: u32,
}

impl Tap {
    /// Takes an attached TAP, which must be without packet information and with the header.
    pub(super) fn new(file: File) -> Result<Self, Error> {
        let needed = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        if flags(&file).host("TUNGETIFF")? & needed != needed {
            return Err(Error::Refused("a network needs a TAP with IFF_NO_PI and IFF_VNET_HDR"));
        }
        let length = i32::try_from(HEADER).unwrap_or_default();
        // SAFETY: the ioctl reads an int, which lives through the call.
        let done = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const length) };
        nix::errno::Errno::result(done).host("TUNSETVNETHDRSZ")?;
        let status = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL).host("F_GETFL of a TAP")?);
        if !status.contains(OFlag::O_NONBLOCK) {
            return Err(Error::Refused("a network needs a TAP with O_NONBLOCK"));
        }
        // Setting them is the way to ask (drivers/net/tun.c). None until a driver has said what it takes.
        let knows = [BASIC | USO, BASIC, 0].into_iter().find(|some| offload(&file, *some).is_ok());
        offload(&file, 0).host("TUNSETOFFLOAD")?;
        Ok(Self { file, knows: knows.unwrap_or(0) })
    }

    /// The features of virtio-net that it can keep.
    pub(super) fn features(&self) -> u64 {
        const BOTH_WAYS: [(u32, &[u32]); 6] = [
            (libc::TUN_F_CSUM, &[VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM]),
            (libc::TUN_F_TSO4, &[VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_GUEST_TSO4]),
            (libc::TUN_F_TSO6, &[VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_GUEST_TSO6]),
            (libc::TUN_F_TSO_ECN, &[VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_GUEST_ECN]),
            (libc::TUN_F_UFO, &[VIRTIO_NET_F_HOST_UFO, VIRTIO_NET_F_GUEST_UFO]),
            (USO, &[VIRTIO_NET_F_HOST_USO, VIRTIO_NET_F_GUEST_USO4, VIRTIO_NET_F_GUEST_USO6]),
        ];
        let known = BOTH_WAYS.iter().filter(|(offload, _)| self.knows & offload == *offload);
        known.flat_map(|(_, features)| features.iter()).fold(0, |all, feature| all | 1 << feature)
    }

    /// Hands frames over as a driver with these features takes them.
    pub(super) fn set_driver(&self, features: u64) -> io::Result<()> {
        offload(&self.file, offloads_of(features))
    }

    /// One frame behind its header. What does not fit is cut.
    pub(super) fn receive(&self, into: &mut [u8]) -> io::Result<usize> {
        (&self.file).read(into)
    }

    /// Sends one frame behind its header, whose fields the kernel checks.
    pub(super) fn send(&self, frame: &[u8]) -> io::Result<()> {
        (&self.file).write(frame).map(drop)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// What a TAP may leave to a driver. All of it presupposes checksums; the kernel refuses ECN without TSO, and half of USO.
fn offloads_of(features: u64) -> u32 {
    let has = |feature: u32| features & 1 << feature != 0;
    if !has(VIRTIO_NET_F_GUEST_CSUM) {
        return 0;
    }
    let mut flags = libc::TUN_F_CSUM;
    let simple = [
        (VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
        (VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
        (VIRTIO_NET_F_GUEST_UFO, libc::TUN_F_UFO),
    ];
    for (feature, flag) in simple {
        flags |= if has(feature) { flag } else { 0 };
    }
    if has(VIRTIO_NET_F_GUEST_ECN) && flags & (libc::TUN_F_TSO4 | libc::TUN_F_TSO6) != 0 {
        flags |= libc::TUN_F_TSO_ECN;
    }
    if has(VIRTIO_NET_F_GUEST_USO4) && has(VIRTIO_NET_F_GUEST_USO6) {
        flags |= USO;
    }
    flags
}

fn flags(file: &File) -> io::Result<i32> {
    // SAFETY: all-zero bytes are a value of this struct of integers and arrays.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // SAFETY: the ioctl writes an ifreq, which lives through the call.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNGETIFF, &raw mut request) };
    nix::errno::Errno::result(done)?;
    // SAFETY: of the union's fields, the ioctl wrote this one; and the others' bytes would be a value of it too.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    Ok(i32::from(flags))
}

fn offload(file: &File, flags: u32) -> io::Result<()> {
    // SAFETY: the ioctl takes its argument by value.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(flags)) };
    nix::errno::Errno::result(done)?;
    Ok(())
}
