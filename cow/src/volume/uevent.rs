//! The kernel's announcements of devices that change.

use std::{
    io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, netlink, recv, socket_with},
};

/// The multicast group of the kernel's own announcements.
const KERNEL: u32 = 1;

/// Hears every announcement from its creation on.
#[derive(Debug)]
pub(super) struct Uevents(OwnedFd);

impl Uevents {
    pub(super) fn listen() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(netlink::KOBJECT_UEVENT))?;
        bind(&socket, &netlink::SocketAddrNetlink::new(0, KERNEL))?;
        Ok(Self(socket))
    }

    /// Calls `condition` now and after every announcement, until it is true or the time is over. Returns the last answer.
    pub(super) fn wait_until(
        &self,
        limit: Duration,
        mut condition: impl FnMut() -> io::Result<bool>,
    ) -> io::Result<bool> {
        let end = Instant::now() + limit;
        loop {
            if condition()? {
                return Ok(true);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || !self.heard(left)? {
                return condition();
            }
        }
    }

    fn heard(&self, limit: Duration) -> io::Result<bool> {
        let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&limit)) {
            Ok(0) => return Ok(false),
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut announcement = [0; 8192];
        loop {
            match recv(&self.0, &mut announcement, RecvFlags::empty()) {
                // Lost announcements are heard too.
                Ok(_) | Err(Errno::NOBUFS | Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(true),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}
