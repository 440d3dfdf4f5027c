//! The machine beneath the bare guest: entry, interrupts, vsock, and nothing else.
//!
//! An ELF image that the VMM boots as it boots Linux. `entry` leaves the privileged mode at once and comes back to it only to halt; all of
//! Rust runs in user mode, which no KVM interprets.

#![no_std]
#![no_main]

extern crate alloc;

mod apic;
mod clock;
mod entry;
mod libc;
mod machine;
mod ports;
mod ring;
mod server;
mod sockets;

use alloc::string::ToString;
use core::panic::PanicInfo;

/// Runs in user mode, on a stack of its own, once.
extern "C" fn live() -> ! {
    machine::give_heap();
    match server::Server::power_on() {
        Ok(mut server) => server.serve(),
        Err(why) => ports::end(&why.to_string()),
    }
}

#[panic_handler]
fn panicked(info: &PanicInfo<'_>) -> ! {
    ports::end(&info.to_string())
}
