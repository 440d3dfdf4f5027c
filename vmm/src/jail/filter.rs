//! Seccomp filters: the lists of [`calls`] as programs of the kernel.
//!
//! Filters are inherited by threads and can only be added to, and the strictest one counts. So the first one allows what building a VM and
//! all its threads need, and each thread then narrows it to its own list; a guest runs only when all have.

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};

use super::calls::{self, Calls};
use crate::error::Error;

/// What a thread is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Build a VM, and start its threads.
    Building,
    /// The event loop of a VM that is built.
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
/// [`Error::Filter`]: the thread must not go on.
pub fn confine(role: Role) -> Result<(), Error> {
    let calls = match role {
        Role::Building => {
            install(&program(
                calls::unknown()?,
                SeccompAction::Allow,
                SeccompAction::Errno(libc::ENOSYS.unsigned_abs()),
            )?)?;
            calls::building()?
        }
        Role::Loop => calls::event_loop()?,
        Role::Vcpu => calls::vcpu()?,
        Role::Pager => calls::pager()?,
        Role::PagerWatch => calls::pager_watch()?,
    };
    install(&program(calls, SeccompAction::KillProcess, SeccompAction::Allow)?)
}

/// As [`confine`], where there is nobody to hand an error to.
pub(crate) fn confine_or_abort(role: Role) {
    if let Err(error) = confine(role) {
        tracing::error!(error = error.chain(), ?role, "a thread cannot be confined");
        std::process::abort();
    }
}

fn program(calls: Calls, otherwise: SeccompAction, listed: SeccompAction) -> Result<BpfProgram, Error> {
    let filter = SeccompFilter::new(calls.rules(), otherwise, listed, TargetArch::x86_64)
        .and_then(BpfProgram::try_from)
        .map_err(|error| Error::Filter(error.into()))?;
    Ok(filter)
}

fn install(program: &BpfProgram) -> Result<(), Error> {
    apply_filter(program).map_err(Error::Filter)
}
