//! Seccomp filters: the lists of [`calls`], installed as programs of the kernel ([`super::program`]).
//!
//! Filters are inherited by threads and can only be added to, and each one costs every call something. So there is none while a shell is
//! prepared, when nothing of a guest is there yet and only the node is heard; then each thread takes its own, before it does anything else.

use seccompiler::apply_filter;

use super::{calls, program};
use crate::error::Error;

/// What a thread is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The event loop of a shell, and of what becomes of it.
    Loop,
    /// Run a vCPU.
    Vcpu,
    /// Fill the memory of VMs: all of a pager's process.
    Pager,
    /// Wait for the end of the VM's pager.
    PagerWatch,
}

/// Confines the calling thread, and those that it will start, to what `role` needs; anything else kills the process.
///
/// # Errors
/// [`Error::Filter`] or [`Error::Jail`]: the thread must not go on.
pub fn confine(role: Role) -> Result<(), Error> {
    let calls = match role {
        Role::Loop => calls::event_loop()?,
        Role::Vcpu => calls::vcpu()?,
        Role::Pager => calls::pager()?,
        Role::PagerWatch => calls::pager_watch()?,
    };
    let program = program::compile(&calls.into_list())?;
    apply_filter(&program).map_err(Error::Filter)
}

/// As [`confine`], where there is nobody to hand an error to.
pub(crate) fn confine_or_abort(role: Role) {
    if let Err(error) = confine(role) {
        tracing::error!(error = error.chain(), ?role, "a thread cannot be confined");
        std::process::abort();
    }
}
