//! The wake page ([`page`]): the first order of a life, and its answer.
//!
//! ```text
//!  booted: the guest rings that it rests ─▶ told; paused: it waits there ─▶ noted in the snapshot
//!  restored or rewound ─▶ order written ─▶ the guest runs, answers, rings ─▶ answer copied out, told
//! ```
//!
//! The page is memory of the guest like any other: it is the guest's to write at any time, and a rewind makes it the snapshot's again with the rest.

use std::sync::atomic::{AtomicU8, Ordering};

use stasis_guest_wire::page::{self, WakePage};
use stasis_vmm_api::Event;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::{Contents, Phase, Vm};
use crate::{
    error::{Error, Host, InGuest},
    layout,
    memory::GuestMemory,
};

/// What the guest rings, to tell that it rests or of its answer: heard once for each time that somebody listens for that.
pub(crate) struct Bell {
    listens: AtomicU8,
    rung: EventFd,
}

/// What is listened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum For {
    Nothing,
    Rest,
    Answer,
}

impl Bell {
    /// One that makes `rung` readable.
    pub(crate) fn new(rung: EventFd) -> Self {
        Self { listens: AtomicU8::new(For::Nothing as u8), rung }
    }

    /// A vCPU has written a port.
    pub(crate) fn port_out(&self, port: u16, value: u8) {
        let (register, bit) = page::BELL;
        let said = if value & bit == 0 { For::Rest } else { For::Answer };
        let (said, nothing) = (said as u8, For::Nothing as u8);
        if port == layout::SERIAL_PORTS.start + register
            && self.listens.compare_exchange(said, nothing, Ordering::SeqCst, Ordering::SeqCst).is_ok()
            && let Err(error) = self.rung.write(1)
        {
            // Its counter holds more than the one ring for which anybody listens.
            tracing::error!(%error, "a guest's bell cannot be rung");
        }
    }

    /// From now on.
    fn listen(&self, listens: For) {
        self.listens.store(listens as u8, Ordering::SeqCst);
    }
}

impl Vm {
    /// Has the guest of this VM, which was booted, be heard when it next says that it rests.
    pub(crate) fn await_rest(&mut self) -> Result<(), Error> {
        if !matches!(self.contents, Contents::Booted(_)) {
            return Err(Error::Refused("only a VM that was booted tells when it rests"));
        }
        self.bus.bell.listen(For::Rest);
        Ok(())
    }

    /// The guest of this paused VM, which was booted, waits for its first order there.
    pub(crate) fn waits_at(&mut self, at: WakePage) -> Result<(), Error> {
        if self.phase != Phase::Paused || !matches!(self.contents, Contents::Booted(_)) {
            return Err(Error::Refused("only a VM that was booted, and is paused, can be found at a wake page"));
        }
        is_waiting(&self.bus.memory, at)?;
        self.wake_page = Some(at);
        Ok(())
    }

    /// What a snapshot of it says of its wake page: one that was restored is past it, whatever is in the page.
    pub(super) fn wake_page(&self) -> Option<WakePage> {
        match &self.contents {
            Contents::Booted(_) => self.wake_page.filter(|at| is_waiting(&self.bus.memory, *at).is_ok()),
            Contents::Restored(_) => None,
        }
    }

    /// Writes an order into the wake page, if this VM stands as its snapshot has it and the guest waits at one. Returns whether it was written.
    pub(crate) fn order(&mut self, text: &str) -> Result<bool, Error> {
        let Contents::Restored(state) = &self.contents else { return Ok(false) };
        let Some(at) = state.wake_page.filter(|_| self.phase == Phase::Paused && self.is_pristine) else {
            return Ok(false);
        };
        let memory = &self.bus.memory;
        // Once: a second order would find no guest that waits.
        if is_waiting(memory, at).is_err() {
            return Ok(false);
        }
        put(memory, at, text)?;
        self.is_ordered = true;
        self.bus.bell.listen(For::Answer);
        Ok(true)
    }

    /// The guest has rung. What it says with that, an answer once for each order.
    pub(crate) fn said(&mut self) -> Result<Option<Event>, Error> {
        let Contents::Restored(state) = &self.contents else { return Ok(Some(Event::Rests)) };
        let Some(at) = state.wake_page.filter(|_| self.is_ordered) else { return Ok(None) };
        // First: it may answer and ring between the look and a later word.
        self.bus.bell.listen(For::Answer);
        let page = copy(&self.bus.memory, at)?;
        if page::Head::of(&page).state != page::ANSWERED {
            return Ok(None);
        }
        self.no_order();
        Ok(Some(Event::Answered { text: page::text(&page).unwrap_or_default() }))
    }

    /// What was ordered, if anything, is so no longer.
    pub(super) fn no_order(&mut self) {
        self.is_ordered = false;
        self.bus.bell.listen(For::Nothing);
    }
}

/// That the guest waits there.
fn is_waiting(memory: &GuestMemory, at: WakePage) -> Result<(), Error> {
    if !at.address.is_multiple_of(page::SIZE as u64) {
        return Err(Error::Refused("a wake page begins at a page's first byte"));
    }
    let head = page::Head::of(&copy(memory, at)?);
    if (head.token, head.state) == (at.token, page::WAITING) {
        Ok(())
    } else {
        Err(Error::Refused("the guest does not wait at this page"))
    }
}

fn copy(memory: &GuestMemory, at: WakePage) -> Result<[u8; page::SIZE], Error> {
    let mut page = [0; page::SIZE];
    memory.read_slice(&mut page, GuestAddress(at.address)).in_guest("its wake page")?;
    Ok(page)
}

/// Writes an order; the state last, should the guest run after all.
fn put(memory: &GuestMemory, at: WakePage, text: &str) -> Result<(), Error> {
    let length = u32::try_from(text.len()).ok().filter(|_| text.len() <= page::LONGEST);
    let length = length.ok_or(Error::Refused("an order is too long for the wake page"))?;
    let field = |offset: usize| GuestAddress(at.address + offset as u64);
    memory.write_slice(text.as_bytes(), field(page::TEXT)).in_guest("its wake page")?;
    memory.write_slice(&length.to_le_bytes(), field(page::LENGTH)).in_guest("its wake page")?;
    memory.write_obj(page::ORDERED.to_le(), field(page::STATE)).in_guest("its wake page")
}

/// Takes the ring out of the counter, if there is one.
pub(crate) fn was_rung(rung: &EventFd) -> Result<bool, Error> {
    match rung.read() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error).host("read of a bell's eventfd"),
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK};

    use super::*;
    use crate::memory;

    const AT: WakePage = WakePage { address: 0x3000, token: 0x0123_4567_89ab_cdef };

    fn waiting() -> GuestMemory {
        let (memory, _) = memory::fresh(1).unwrap();
        memory.write_obj(AT.token.to_le(), GuestAddress(AT.address)).unwrap();
        memory.write_obj(page::WAITING.to_le(), GuestAddress(AT.address + page::STATE as u64)).unwrap();
        memory
    }

    #[test]
    fn a_page_is_known_by_its_place_its_token_and_that_the_guest_waits() {
        let memory = waiting();
        is_waiting(&memory, AT).unwrap();
        for other in [
            WakePage { token: 1, ..AT },
            WakePage { address: AT.address + 8, ..AT },
            WakePage { address: AT.address + 4096, ..AT },
            WakePage { address: 1 << 20, ..AT },
            WakePage { address: !4095, ..AT },
        ] {
            assert!(is_waiting(&memory, other).is_err(), "{other:?}");
        }
        put(&memory, AT, "do it").unwrap();
        assert!(is_waiting(&memory, AT).is_err(), "it has an order");
        let page = copy(&memory, AT).unwrap();
        assert_eq!((page::Head::of(&page).state, page::text(&page).as_deref()), (page::ORDERED, Some("do it")));
        assert!(put(&memory, AT, &"x".repeat(page::LONGEST + 1)).is_err());
    }

    #[test]
    fn the_bell_is_heard_once_and_only_while_somebody_listens() {
        let rung = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).unwrap();
        let bell = Bell::new(rung.try_clone().unwrap());
        let ring = |value: u8| bell.port_out(layout::SERIAL_PORTS.start + 4, value);
        ring(0x0f);
        assert!(!was_rung(&rung).unwrap(), "nobody listens");
        for (awaited, rings, other) in [(For::Answer, 0x0f, 0x0b), (For::Rest, 0x0b, 0x0f)] {
            bell.listen(awaited);
            ring(other);
            bell.port_out(layout::SERIAL_PORTS.start, rings);
            assert!(!was_rung(&rung).unwrap(), "that says something else, or is another register");
            (0..3).for_each(|_| ring(rings));
            assert_eq!(rung.read().unwrap(), 1);
        }
    }
}
