//! One VM whose memory is filled.

use std::{
    collections::VecDeque,
    ops::Range,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use nix::{
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::socket::{Shutdown, shutdown},
};
use stasis_cow::FRAME;
use stasis_vmm_api::{
    MAX_PACKET,
    pager::{Handover, PagerReport},
};

use super::store::Store;
use crate::{
    control::{self, Received},
    error::{Error, Host},
    uffd::Faults,
};

/// A VM: first its socket alone, then its memory too.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) socket: OwnedFd,
    memory: Option<Memory>,
    /// Frames that it was given, by frame.
    given: Vec<bool>,
    /// Those of them that it had to wait for, in order.
    touched: Vec<u32>,
    /// What is to be put in ahead of its faults.
    ahead: VecDeque<u32>,
    helped: bool,
    settled: bool,
    report: PagerReport,
}

#[derive(Debug)]
struct Memory {
    faults: Faults,
    addresses: Range<u64>,
}

impl Served {
    /// A VM that will be helped with `ahead`.
    pub(super) fn new(socket: OwnedFd, frames: usize, ahead: &[u32]) -> Self {
        Self {
            socket,
            memory: None,
            given: vec![false; frames],
            touched: Vec::new(),
            ahead: ahead.iter().copied().collect(),
            helped: !ahead.is_empty(),
            settled: false,
            report: PagerReport { helped: !ahead.is_empty(), ..PagerReport::default() },
        }
    }

    /// Takes what the VMM process hands over. `None`: it is gone.
    pub(super) fn receive(&mut self, store: &Store) -> Result<Option<&Faults>, Error> {
        let Some(Received { request, mut files }) =
            control::receive::<Handover>(self.socket.as_fd(), &mut vec![0; MAX_PACKET])?
        else {
            return Ok(None);
        };
        let Handover { address, bytes } = request;
        let (Some(file), None, true) = (files.pop(), &self.memory, files.is_empty()) else {
            return Err(Error::Control("a VM hands over one userfaultfd, once".into()));
        };
        // Of a process that may have been taken over: the addresses are its own, and so is the harm of wrong ones.
        let end = address.checked_add(bytes).filter(|_| bytes == store.bytes());
        let end = end.ok_or_else(|| Error::Control("the VM's memory is not the image's".into()))?;
        let flags = fcntl(&file, FcntlArg::F_GETFL).host("F_GETFL of a userfaultfd")?;
        if !OFlag::from_bits_truncate(flags).contains(OFlag::O_NONBLOCK) {
            return Err(Error::Control("the VM's userfaultfd blocks".into()));
        }
        let memory = Memory { faults: Faults::received(file), addresses: address..end };
        memory.faults.wake(&memory.addresses).host("UFFDIO_WAKE of what a VM handed over")?;
        Ok(Some(&self.memory.insert(memory).faults))
    }

    /// Answers the faults that wait, all with one wake-up.
    pub(super) fn answer(&mut self, store: &mut Store) -> Result<(), Error> {
        let Some(Memory { faults, addresses }) = &self.memory else { return Ok(()) };
        let waiting = faults.take().host("read of a userfaultfd")?;
        self.report.faults += waiting.len() as u64;
        let frame = |address: &u64| u32::try_from(address.checked_sub(addresses.start)? / FRAME as u64).ok();
        let mut frames: Vec<u32> = waiting.iter().filter_map(frame).collect();
        // Neighbours in time are often of one frame.
        frames.dedup();
        for frame in frames {
            give(faults, addresses, store, frame)?;
            let given = self.given.get_mut(frame as usize).map(|given| std::mem::replace(given, true));
            if !self.settled && given == Some(false) {
                self.touched.push(frame);
            }
        }
        if waiting.is_empty() { Ok(()) } else { faults.wake(addresses).host("UFFDIO_WAKE") }
    }

    /// Whether there is something to put in ahead, and somewhere to put it.
    pub(super) fn wants_more(&self) -> bool {
        self.memory.is_some() && !self.ahead.is_empty()
    }

    /// Puts in the next frame of the working set. Whoever already waits for it is woken when that fault's turn comes.
    pub(super) fn put_ahead(&mut self, store: &mut Store) -> Result<(), Error> {
        let (Some(Memory { faults, addresses }), Some(frame)) = (&self.memory, self.ahead.pop_front()) else {
            return Ok(());
        };
        match self.given.get_mut(frame as usize) {
            Some(given) if !*given => {
                *given = true;
                self.report.ahead += 1;
                give(faults, addresses, store, frame)
            }
            _ => Ok(()),
        }
    }

    /// The first answer is out: what was touched, if that was not asked before, and what it took.
    pub(super) fn settle(&mut self) -> (Option<(Vec<u32>, bool)>, PagerReport) {
        let first = !std::mem::replace(&mut self.settled, true);
        (first.then(|| (std::mem::take(&mut self.touched), self.helped)), self.report)
    }

    /// The descriptor of its faults.
    pub(super) fn faults(&self) -> Option<i32> {
        self.memory.as_ref().map(|memory| memory.faults.as_raw_fd())
    }
}

/// Fills a frame and maps it into the VM.
fn give(faults: &Faults, addresses: &Range<u64>, store: &mut Store, frame: u32) -> Result<(), Error> {
    store.fill(frame)?;
    let start = addresses.start + u64::from(frame) * FRAME as u64;
    faults.map(start..start + FRAME as u64).host("UFFDIO_CONTINUE")
}

impl Drop for Served {
    /// The VMM process, if it still lives, ends itself: it holds its userfaultfd too, so that none of its faults is ever answered by the
    /// closing of this one.
    fn drop(&mut self) {
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both); // it fails where the other end is gone
    }
}
