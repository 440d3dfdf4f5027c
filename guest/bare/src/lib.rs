//! The bare guest: it speaks the agent's protocol and answers HTTP, like a template's guest, but has no kernel.
//!
//! Where guest kernels are interpreted (docs/ARCHITECTURE.md, "Guest kernels and lanes") a Linux guest's share of a request is a hundred times
//! the host's. This one runs in user mode at full speed on every KVM, so what is measured with it is Stasis, and thousands of sandboxes can be
//! made of it in a test. It is booted like any kernel (`stasis up --kernel`), and the node does not know the difference.
//!
//! What it does not have: files, processes, a clock that anybody reads, random numbers. Steps of the repair that concern these are said to be
//! done since there is nothing to repair; host name, machine id and boot nonce are kept and told, as a Linux guest's are.
//!
//! [`agent`] is a connection's conversation, [`boot`] the one at power-on, [`function`] what requests are answered with,
//! [`packet`] what vsock carries them in. All take bytes and give bytes; the machine beneath them is in `bin/`.

#![cfg_attr(not(test), no_std)]

extern crate alloc;

pub mod agent;
pub mod boot;
pub mod function;
pub mod packet;
