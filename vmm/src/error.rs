//! The one error of this crate; its chain of sources ends up, joined, in [`stasis_vmm_api::Reply::Failed`].

use std::io;

use vm_memory::GuestMemoryError;

/// Why a request to the VMM failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A KVM ioctl failed.
    #[error("{ioctl} failed")]
    Ioctl {
        /// Its name in `linux/kvm.h`.
        ioctl: &'static str,
        /// What the kernel said.
        #[source]
        source: kvm_ioctls::Error,
    },
    /// Another call to the host failed.
    #[error("{what} failed")]
    Host {
        /// Which.
        what: &'static str,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// KVM read or wrote fewer MSRs than it was given.
    #[error("KVM refuses MSR {0:#x}, which it took when the snapshot was made")]
    Msr(u32),
    /// An address lies outside guest memory.
    #[error("guest memory at {what} cannot be accessed")]
    Memory {
        /// What was to be there.
        what: &'static str,
        /// Why not.
        #[source]
        source: GuestMemoryError,
    },
    /// The kernel image cannot be loaded.
    #[error("the guest kernel cannot be loaded: {0}")]
    Kernel(String),
    /// The command line is not acceptable.
    #[error("the kernel command line is not acceptable: {0}")]
    Cmdline(String),
    /// A snapshot does not fit this VMM or this request.
    #[error("the snapshot does not fit: {0}")]
    Snapshot(String),
    /// A snapshot was made on a host that this one is unlike, or by another stasis.
    #[error(
        "the snapshot was made on another kind of host, or by another stasis: its {what} was {was}, and here is {is}"
    )]
    Incompatible {
        /// What differs.
        what: &'static str,
        /// As it was.
        was: String,
        /// As it is here.
        is: String,
    },
    /// A frame of a compressed memory image, or all of it, cannot be had.
    #[error(transparent)]
    Frames(#[from] stasis_cow::FramesError),
    /// The request makes no sense in the VM's present state.
    #[error("{0}")]
    Refused(&'static str),
    /// The other side of the control socket broke the protocol or is gone.
    #[error("the control socket failed: {0}")]
    Control(String),
    /// The process cannot be jailed, and so must not serve.
    #[error("the jail cannot be entered: {0}")]
    Jail(&'static str),
    /// A thread's system calls cannot be confined.
    #[error("a seccomp filter cannot be installed; see `stasis doctor`")]
    Filter(#[source] seccompiler::Error),
}

impl Error {
    /// The message with all its causes, for the one line that crosses the control socket.
    #[must_use]
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut next = std::error::Error::source(self);
        while let Some(cause) = next {
            text.push_str(": ");
            text.push_str(&cause.to_string());
            next = cause.source();
        }
        text
    }
}

/// Names the ioctl of a KVM error.
pub(crate) trait Ioctl<T> {
    fn ioctl(self, name: &'static str) -> Result<T, Error>;
}

impl<T> Ioctl<T> for Result<T, kvm_ioctls::Error> {
    fn ioctl(self, ioctl: &'static str) -> Result<T, Error> {
        self.map_err(|source| Error::Ioctl { ioctl, source })
    }
}

/// Names the call of a host error.
pub(crate) trait Host<T> {
    fn host(self, what: &'static str) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> Host<T> for Result<T, E> {
    fn host(self, what: &'static str) -> Result<T, Error> {
        self.map_err(|source| Error::Host { what, source: source.into() })
    }
}

/// Names what was to be at an address of the guest.
pub(crate) trait InGuest<T> {
    fn in_guest(self, what: &'static str) -> Result<T, Error>;
}

impl<T> InGuest<T> for Result<T, GuestMemoryError> {
    fn in_guest(self, what: &'static str) -> Result<T, Error> {
        self.map_err(|source| Error::Memory { what, source })
    }
}
