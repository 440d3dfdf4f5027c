//! The few calls for which no safe wrapper exists: the kernel's generator, a network interface's flags and a serial port's lines.

use std::{
    fs::File,
    io,
    mem::size_of,
    os::fd::{AsFd, AsRawFd},
};

use nix::{
    ioctl_none, ioctl_write_ptr_bad, request_code_write,
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};

/// Bytes of host entropy that a wake brings.
pub const SEED: usize = 64;

/// `struct rand_pool_info` with its flexible array at [`SEED`] bytes.
#[repr(C)]
struct PoolInfo {
    entropy_count: libc::c_int,
    buf_size: libc::c_int,
    buf: [u8; SEED],
}

ioctl_write_ptr_bad!(
    /// RNDADDENTROPY.
    rnd_add_entropy,
    request_code_write!(b'R', 0x03, size_of::<[libc::c_int; 2]>()),
    PoolInfo
);
ioctl_none!(
    /// RNDRESEEDCRNG.
    rnd_reseed_crng,
    b'R',
    0x07
);
ioctl_write_ptr_bad!(
    /// SIOCSIFFLAGS.
    set_interface_flags,
    libc::SIOCSIFFLAGS,
    libc::ifreq
);

ioctl_write_ptr_bad!(
    /// TIOCMBIS.
    raise_lines,
    libc::TIOCMBIS,
    libc::c_int
);
ioctl_write_ptr_bad!(
    /// TIOCMBIC.
    lower_lines,
    libc::TIOCMBIC,
    libc::c_int
);

/// `TIOCM_OUT1` of `asm-generic/termios.h`: a modem control line that no PC wires to anything.
static OUT1: libc::c_int = 0x2000;

/// Raises the OUT1 line of a serial port.
///
/// # Errors
/// What the kernel answered.
pub fn raise_out1(port: &File) -> io::Result<()> {
    // SAFETY: this request reads one int, which outlives the call.
    unsafe { raise_lines(port.as_raw_fd(), &raw const OUT1) }?;
    Ok(())
}

/// Lowers it.
///
/// # Errors
/// What the kernel answered.
pub fn lower_out1(port: &File) -> io::Result<()> {
    // SAFETY: as above.
    unsafe { lower_lines(port.as_raw_fd(), &raw const OUT1) }?;
    Ok(())
}

/// Credits `seed` to the kernel's generator as full entropy.
///
/// # Errors
/// What the kernel answered.
pub fn add_entropy(random: &File, seed: &[u8; SEED]) -> io::Result<()> {
    let info = PoolInfo { entropy_count: 8 * 64, buf_size: 64, buf: *seed };
    // SAFETY: `info` is laid out as the kernel's rand_pool_info, its two counts describe `buf`, and it outlives the
    // call, which only reads it.
    unsafe { rnd_add_entropy(random.as_raw_fd(), &raw const info) }?;
    Ok(())
}

/// Makes the kernel's generator take a new key from its pool now, not at its next turn.
///
/// # Errors
/// What the kernel answered.
pub fn reseed(random: &File) -> io::Result<()> {
    // SAFETY: this request takes no argument and touches no memory of ours.
    unsafe { rnd_reseed_crng(random.as_raw_fd()) }?;
    Ok(())
}

/// Brings the loopback interface up; the kernel then gives it 127.0.0.1 and ::1 itself.
///
/// # Errors
/// What the kernel answered.
pub fn loopback_up() -> io::Result<()> {
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    let mut name = [0; libc::IFNAMSIZ];
    for (to, from) in name.iter_mut().zip(b"lo") {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    let flags = libc::c_short::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or(libc::c_short::MAX);
    let request = libc::ifreq { ifr_name: name, ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags: flags } };
    // SAFETY: `request` is a whole ifreq with a terminated name and the union member that this request reads; it
    // outlives the call.
    unsafe { set_interface_flags(socket.as_fd().as_raw_fd(), &raw const request) }?;
    Ok(())
}
