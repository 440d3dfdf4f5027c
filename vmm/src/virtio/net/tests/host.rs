//! The host's side of a test: a network namespace of the test's own thread, with one TAP in it.

use std::{
    collections::HashMap,
    fs::File,
    net::UdpSocket,
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::fs::OpenOptionsExt,
    },
    process::Command,
    sync::{Arc, Mutex},
    time::Duration,
};

use nix::{errno::Errno, sched::CloneFlags};

use crate::virtio::watch::{Events, Sources, Watch};

pub(super) const TAP_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0xfe];
pub(super) const GUEST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(super) const TAP_IP: [u8; 4] = [10, 9, 0, 1];
pub(super) const GUEST_IP: [u8; 4] = [10, 9, 0, 2];

/// The TAP, up, with an address and the guest as its neighbour; or a word why there can be none.
pub(super) fn tap() -> Option<File> {
    let skip = |what: &str, why: String| {
        eprintln!("SKIPPED: {what}: {why}");
        None
    };
    if let Err(error) = nix::sched::unshare(CloneFlags::CLONE_NEWNET) {
        return skip("a network namespace (needs root)", error.to_string());
    }
    let file = match open_tap(libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) {
        Ok(file) => file,
        Err(error) => return skip("a TAP", error.to_string()),
    };
    let steps = [
        "link set tap0 address 02:00:00:00:00:fe",
        "link set tap0 addrgenmode none", // else IPv6 sends frames of its own
        "address add 10.9.0.1/24 dev tap0",
        "link set tap0 up",
        "neighbour add 10.9.0.2 lladdr 02:00:00:00:00:01 nud permanent dev tap0",
    ];
    for step in steps {
        if let Err(error) = ip(step) {
            return skip("iproute2", error);
        }
    }
    Some(file)
}

pub(super) fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output().map_err(|error| error.to_string())?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

/// Opens `tap0` with these flags, in this thread's network namespace.
pub(super) fn open_tap(flags: i32) -> std::io::Result<File> {
    let file = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    // SAFETY: all-zero bytes are a value of this struct of integers and arrays.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"tap0") {
        *to = i8::try_from(*from).unwrap();
    }
    request.ifr_ifru.ifru_flags = i16::try_from(flags).unwrap();
    // SAFETY: the ioctl reads and writes an ifreq, which lives through the call.
    Errno::result(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    Ok(file)
}

/// A socket on the host's address.
pub(super) fn socket() -> UdpSocket {
    let socket = UdpSocket::bind(("10.9.0.1", 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    socket
}

/// What is sent on a socket from now on is cut into datagrams of this size.
pub(super) fn cut_into(socket: &UdpSocket, size: i32) {
    let length = libc::socklen_t::try_from(size_of::<i32>()).unwrap();
    let value = (&raw const size).cast();
    // SAFETY: the option's value is an int, which lives through the call.
    let done = unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, value, length) };
    Errno::result(done).unwrap();
}

/// Remembers what is watched, by number.
#[derive(Default)]
pub(super) struct Watched(Mutex<HashMap<u8, Events>>);

impl Watched {
    pub(super) fn sources(self: &Arc<Self>) -> Sources {
        Sources::new(self.clone(), 0)
    }

    pub(super) fn tap(&self) -> bool {
        self.0.lock().unwrap().get(&super::TAP).is_some_and(|events| events.read)
    }
}

impl Watch for Watched {
    fn watch(&self, _: BorrowedFd<'_>, key: u64, events: Events) -> std::io::Result<()> {
        let (_, number) = crate::virtio::watch::source_of(key).unwrap();
        self.0.lock().unwrap().insert(number, events);
        Ok(())
    }
}

/// A datagram from the guest to the host, from Ethernet's header on. `partial`: its checksum is left to the device.
pub(super) fn datagram(port: u16, payload: &[u8], partial: bool) -> Vec<u8> {
    let length = u16::try_from(8 + payload.len()).unwrap();
    let total = (length + 20).to_be_bytes();
    let mut ip = [&[0x45, 0, total[0], total[1], 0, 0, 0x40, 0, 64, 17, 0, 0][..], &GUEST_IP, &TAP_IP].concat();
    let checksum = !sum(&ip);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    let pseudo = [&GUEST_IP[..], &TAP_IP, &[0, 17], &length.to_be_bytes()].concat();
    let checksum = if partial { sum(&pseudo) } else { 0 };
    let udp = [9_u16, port, length, checksum].map(u16::to_be_bytes).concat();
    [&TAP_MAC[..], &GUEST_MAC, &[8, 0], &ip, &udp, payload].concat()
}

/// The Internet's checksum before it is turned around.
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap()
}
