//! The pager: a process of its own, one per template, that fills the memory of the template's VMs as they touch it.
//!
//! ```text
//!  image ──read, checked──▶ store (a memfd) ──mapped privately by──▶ VMs' memory
//!                              ▲ filled once, for all VMs               │ fault: a page that is not mapped yet
//!                              └──────────── pager ◀──userfaultfd───────┘ answered by UFFDIO_CONTINUE
//! ```
//!
//! A guest never reads a zero that was none: VMs' mappings are registered for missing and for minor faults, so nothing of the memfd is mapped
//! into one before the pager says so, and it says so of frames that it has filled. A frame that cannot be read ends the VMs that need it; the
//! pager's end ends all of its VMs ([`crate::memory::Paged`]).

mod serve;
mod set;
mod store;
mod vm;

pub use serve::serve_images;

#[cfg(test)]
mod tests;
