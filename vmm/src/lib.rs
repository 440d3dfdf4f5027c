//! One microVM: boot, devices, snapshot, restore.
//!
//! [`serve`] is the whole life of a `stasis vmm` process: one control socket in, one VM, then the end. It opens
//! nothing by path (every file arrives over the socket), knows no tenant and no template name, and runs no async runtime.
//!
//! ```text
//! jail      what the process gives up first; the system calls of each thread
//! process   the event loop: control requests, queue notifications, vsock streams
//! └ vm      the machine: memory, interrupt controllers, vCPU threads, devices
//!   ├ boot      kernel, boot parameters, page tables, MP table
//!   ├ vcpu      one thread per vCPU, its states and its saved form
//!   ├ virtio    the mmio transport; block, vsock, net, rng, balloon
//!   ├ memory    the one region: made, mapped, written out, given back
//!   └ snapshot  memory image and machine state, written and read
//! pager     a process of its own: fills the memory of a template's VMs as they touch it
//! uffd      faults that are answered, writes that are noted
//! limit     what a claim costs at least, for the bench
//! fuzzing   what the fuzz targets call (feature `fuzz`)
//! ```
//!
//! `unsafe` is used where the kernel demands it: raw descriptors, `prctl`, `mmap`, KVM's memory slots and XSAVE ioctls.

mod boot;
mod bus;
mod console;
mod control;
mod cpuid;
mod error;
#[cfg(feature = "fuzz")]
pub mod fuzzing;
#[cfg(test)]
#[allow(dead_code, reason = "tests/kvm uses the rest")]
#[path = "../tests/kvm/guest.rs"]
mod guest;
pub mod jail;
mod layout;
pub mod limit;
mod memory;
mod pager;
mod process;
mod snapshot;
mod traits;
mod uffd;
mod vcpu;
mod virtio;
mod vm;

pub use control::control_socket;
pub use error::Error;
pub use memory::Pagemap;
pub use pager::serve_images;
pub use process::serve;
pub use snapshot::machine_of;
pub use vm::kvm_version;
