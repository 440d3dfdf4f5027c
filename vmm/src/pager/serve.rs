//! The life of a pager process: one epoll loop over its control socket, its VMs' sockets and their faults.
//!
//! Demand goes first: only when no fault waits is a frame of some VM's working set put in, one at a time.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
};

use stasis_vmm_api::{
    MAX_PACKET,
    pager::{FromPager, PagerReply, PagerRequest},
};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::{set::WorkingSet, store::Store, vm::Served};
use crate::{
    control::{self, Received},
    error::{Error, Host},
    jail::{self, Role},
};

/// Tokens: the control socket; then, for each VM, twice its number for its socket, and one more for its faults.
const CONTROL: u64 = u64::MAX;
const EVENTS_AT_ONCE: usize = 64;
const TWICE: Error = Error::Refused("this pager has an image already");
const NO_IMAGE: Error = Error::Refused("this pager has no image yet");
const NO_VM: Error = Error::Refused("this pager has no such VM");

/// Serves requests from `control` until it closes. The calling thread is confined to the system calls that this needs.
///
/// # Errors
/// When the process can do no more: its control socket broke, or an essential call failed. All its VMs end with it.
pub fn serve_images(control: OwnedFd) -> Result<(), Error> {
    jail::tame_allocator()?;
    let mut pager = Pager::new(control)?;
    jail::confine(Role::Pager)?;
    pager.run()
}

pub(super) struct Pager {
    control: OwnedFd,
    epoll: Epoll,
    image: Option<Image>,
    vms: BTreeMap<u64, Served>,
}

struct Image {
    store: Store,
    set: WorkingSet,
}

impl Pager {
    pub(super) fn new(control: OwnedFd) -> Result<Self, Error> {
        let pager = Self { control, epoll: Epoll::new().host("epoll_create")?, image: None, vms: BTreeMap::new() };
        pager.watch(pager.control.as_raw_fd(), CONTROL)?;
        Ok(pager)
    }

    fn watch(&self, fd: RawFd, token: u64) -> Result<(), Error> {
        self.epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, token)).host("epoll_ctl")
    }

    pub(super) fn run(&mut self) -> Result<(), Error> {
        let mut events = vec![EpollEvent::default(); EVENTS_AT_ONCE];
        loop {
            let idle = !self.vms.values().any(Served::wants_more);
            let count = match self.epoll.wait(if idle { -1 } else { 0 }, &mut events) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other.host("epoll_wait")?,
            };
            for event in &events[..count] {
                match event.data() {
                    CONTROL if !self.ask()? => return Ok(()),
                    CONTROL => {}
                    token => self.serve(token / 2, token % 2 == 1)?,
                }
            }
            if count == 0 {
                self.put_ahead()?;
            }
        }
    }

    /// Takes one request and answers it. Returns whether the node is still there.
    fn ask(&mut self) -> Result<bool, Error> {
        let Some(Received { request, files }) = control::receive(self.control.as_fd(), &mut vec![0; MAX_PACKET])?
        else {
            return Ok(false);
        };
        let reply = self.handle(request, files).unwrap_or_else(|error| PagerReply::Failed { reason: error.chain() });
        control::send(self.control.as_fd(), &FromPager::Reply(reply), None)?;
        Ok(true)
    }

    fn handle(&mut self, request: PagerRequest, files: Vec<File>) -> Result<PagerReply, Error> {
        const FILES: Error = Error::Refused("the request came with another number of files");
        match request {
            PagerRequest::Open { format } => {
                let [image, memory, set] = files.try_into().map_err(|_| FILES)?;
                if self.image.is_some() {
                    return Err(TWICE);
                }
                let store = Store::open(format, image, memory)?;
                let set = WorkingSet::open(set, store.frames())?;
                self.image = Some(Image { store, set });
                Ok(PagerReply::Done)
            }
            PagerRequest::Attach { vm } => {
                let [socket] = files.try_into().map_err(|_| FILES)?;
                let Image { store, set } = self.image.as_ref().ok_or(NO_IMAGE)?;
                if vm > u64::MAX / 4 || self.vms.contains_key(&vm) {
                    return Err(Error::Refused("a VM's number is below 2^62 and given once"));
                }
                let served = Served::new(socket.into(), store.frames(), set.ahead());
                self.watch(served.socket.as_raw_fd(), vm * 2)?;
                self.vms.insert(vm, served);
                Ok(PagerReply::Done)
            }
            PagerRequest::Settled { vm } => {
                let Image { store, set } = self.image.as_mut().ok_or(NO_IMAGE)?;
                let (life, mut report) = self.vms.get_mut(&vm).ok_or(NO_VM)?.settle();
                report.bytes_read = store.bytes_read();
                if let Some((touched, helped)) = life
                    && let Err(error) = set.lived(touched, helped)
                {
                    // It is advice: the next lives are slower, and learn again.
                    tracing::warn!(error = error.chain(), "the working set cannot be kept");
                }
                Ok(PagerReply::Settled(report))
            }
        }
    }

    /// Something of a VM is there to be read. One that has been lost meanwhile is no longer there.
    fn serve(&mut self, vm: u64, is_fault: bool) -> Result<(), Error> {
        let (Some(served), Some(Image { store, .. })) = (self.vms.get_mut(&vm), &mut self.image) else {
            return Ok(());
        };
        let done = if is_fault {
            served.answer(store)
        } else {
            match served.receive(store) {
                Ok(None) => {
                    // It has ended, by itself or not.
                    self.forget(vm);
                    return Ok(());
                }
                Ok(Some(faults)) => {
                    let fd = faults.as_raw_fd();
                    self.watch(fd, vm * 2 + 1)
                }
                Err(error) => Err(error),
            }
        };
        self.unless_lost(vm, done)
    }

    fn put_ahead(&mut self) -> Result<(), Error> {
        let Some(Image { store, .. }) = &mut self.image else { return Ok(()) };
        let Some((vm, served)) = self.vms.iter_mut().find(|(_, served)| served.wants_more()) else { return Ok(()) };
        let (vm, done) = (*vm, served.put_ahead(store));
        self.unless_lost(vm, done)
    }

    /// A VM whose memory cannot be filled must not go on.
    fn unless_lost(&mut self, vm: u64, done: Result<(), Error>) -> Result<(), Error> {
        let Err(error) = done else { return Ok(()) };
        let reason = error.chain();
        tracing::error!(vm, reason, "a VM is lost: its memory cannot be filled");
        self.forget(vm);
        control::send(self.control.as_fd(), &FromPager::Lost { vm, reason }, None)
    }

    fn forget(&mut self, vm: u64) {
        let Some(served) = self.vms.remove(&vm) else { return };
        for fd in [Some(served.socket.as_raw_fd()), served.faults()].into_iter().flatten() {
            // The VMM process may hold the same files: closing ours would not end the watch. One that was never begun fails.
            let _ = self.epoll.ctl(ControlOperation::Delete, fd, EpollEvent::default());
        }
    }
}
