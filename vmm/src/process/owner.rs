//! Whose VM it is: who asks, and who is told.
//!
//! ```text
//!  a node ──closes, or dies──▶ the process ends
//!    │ Keep
//!    ▼
//!  a node ──closes, or dies──▶ nobody: the VM goes on as it was ──connects──▶ a node ──▶ …
//! ```

use std::{
    fs::File,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::socket::{SockFlag, accept4},
};
use stasis_vmm_api::FromVmm;

use crate::{
    control::{Control, Next, Received, Sent},
    error::{Error, Host},
};

/// See the module.
pub(super) struct Owner {
    /// None: between two owners.
    control: Option<Control>,
    /// The present one has asked for something. Until then it expects no word.
    has_asked: bool,
    kept: Option<Kept>,
}

/// What a VM that outlives its owner has from it.
struct Kept {
    /// Where the next one comes to.
    listener: OwnedFd,
    /// What that is given.
    files: Vec<File>,
}

/// What an owner has to say.
pub(super) enum Heard {
    Request(Received),
    /// Nothing more for now.
    Nothing,
    /// It is gone, and the VM goes on without.
    Left,
    /// It is gone, and the VM ends with it.
    End,
}

impl Owner {
    pub(super) fn new(control: Control) -> Self {
        Self { control: Some(control), has_asked: false, kept: None }
    }

    /// From now on the VM outlives its owner.
    pub(super) fn keep(&mut self, listener: OwnedFd, files: Vec<File>) -> Result<(), Error> {
        if self.kept.is_some() {
            return Err(Error::Refused("this VM is kept already"));
        }
        self.kept = Some(Kept { listener, files });
        Ok(())
    }

    /// What the next owner is given.
    pub(super) fn files(&self) -> Result<Vec<BorrowedFd<'_>>, Error> {
        match &self.kept {
            Some(kept) => Ok(kept.files.iter().map(AsFd::as_fd).collect()),
            None => Err(Error::Refused("this VM is not kept: it has one owner only")),
        }
    }

    /// Where the next owner comes to, while there is none.
    pub(super) fn awaited_at(&self) -> Option<BorrowedFd<'_>> {
        match (&self.control, &self.kept) {
            (None, Some(kept)) => Some(kept.listener.as_fd()),
            _ => None,
        }
    }

    /// Where the owner speaks.
    pub(super) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.control.as_ref().map(AsFd::as_fd)
    }

    /// The owner's next packet, if there is one.
    pub(super) fn listen(&mut self) -> Result<Heard, Error> {
        let Some(control) = &mut self.control else { return Ok(Heard::Nothing) };
        match control.receive_next()? {
            Next::Request(received) => {
                self.has_asked = true;
                Ok(Heard::Request(received))
            }
            Next::Nothing => Ok(Heard::Nothing),
            Next::Gone if self.kept.is_some() => {
                // Closed, it is in no epoll any more.
                self.control = None;
                Ok(Heard::Left)
            }
            Next::Gone => Ok(Heard::End),
        }
    }

    /// Takes the next owner, if it has come. Whoever can reach the socket is one: it lies in a folder of root's alone.
    pub(super) fn welcome(&mut self) -> Result<bool, Error> {
        let Some(listener) = self.awaited_at() else { return Ok(false) };
        match accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
            Ok(accepted) => {
                // SAFETY: the kernel has just made this descriptor for this call; nothing else owns it.
                let socket = unsafe { OwnedFd::from_raw_fd(accepted) };
                self.control = Some(Control::new(socket));
                self.has_asked = false;
                Ok(true)
            }
            // It left before it was taken, or the kernel was interrupted: the next one will be heard of.
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ECONNABORTED) => Ok(false),
            Err(error) => Err(error).host("accept4 of the next owner"),
        }
    }

    /// Tells the owner something. What a kept VM has to say while it has none, or one that has not asked yet, is lost: the next one asks.
    pub(super) fn tell(&self, message: &FromVmm, with: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let Some(control) = self.control.as_ref().filter(|_| self.has_asked) else { return Ok(()) };
        match control.send(message, with)? {
            // The end of the connection is read next.
            Sent::Gone if self.kept.is_some() => Ok(()),
            Sent::Gone => Err(Error::Control("the node is gone".into())),
            Sent::Whole => Ok(()),
        }
    }
}
