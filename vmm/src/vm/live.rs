//! A snapshot taken beside the running guest.
//!
//! ```text
//!  begin ──▶ round: what was written since the last one, protected again ──▶ copied, a slice per turn of the event loop ─┐
//!              ▲──────────────────────── much was found, and rounds are left ◀───────────────────────────────────────────┘
//!              └─ little, or no rounds left ─▶ pause: state, what was written since, the disks' clones ─▶ resume ─▶ end
//! ```
//!
//! The pause grows with what the guest writes during the last round, never with its memory. Between slices the event loop serves the guest's devices
//! as ever.

use std::{collections::VecDeque, fs::File, io::Write, ops::Range, time::Instant};

use stasis_vmm_api::LiveReport;

use super::{Contents, Phase, Vm};
use crate::{
    bus::lock,
    error::{Error, Host},
    memory::{self, Pagemap},
    snapshot::VmState,
    uffd::Uffd,
    vcpu::Lasts,
    virtio::Transport,
};

/// Bytes copied in a turn of the event loop: some tenths of a millisecond.
const SLICE: u64 = 512 << 10;
/// What is left to the pause, in bytes.
const LITTLE: u64 = 256 << 10;
/// Rounds after which a guest that writes faster than it is copied is paused nevertheless.
const ROUNDS: u32 = 8;

/// A live snapshot under way.
pub(crate) struct Live {
    image: File,
    state: File,
    /// One for each disk that the guest can write.
    clones: Vec<File>,
    began: Instant,
    rounds: u32,
    /// Host addresses that this round has yet to copy.
    to_copy: VecDeque<Range<u64>>,
    /// The next step is the last: what is left is for the pause.
    is_ripe: bool,
    written: u64,
}

impl Vm {
    /// Begins one. Unless this fails, [`Vm::live_end`] must follow, whatever happens in between.
    pub(crate) fn live_begin(&self, uffd: &Uffd, image: File, state: File, clones: Vec<File>) -> Result<Live, Error> {
        self.refuse_if_stopped()?;
        if self.paged.is_some() {
            return Err(Error::Refused(
                "a VM whose memory a pager fills cannot be snapshotted: not all of it is there",
            ));
        }
        if matches!(self.contents, Contents::Booted(_)) {
            return Err(Error::Refused("only a restored VM can be snapshotted while it runs: pause this one"));
        }
        if clones.len() != self.machine.disks.iter().filter(|disk| !disk.read_only).count() {
            return Err(Error::Refused("a live snapshot needs one file for each disk that the guest can write"));
        }
        if image.metadata().host("fstat of the memory image")?.len() != self.bus.room.size() as u64 {
            return Err(Error::Refused("the memory image is no clone of the one that the VM was restored from"));
        }
        uffd.register(&self.bus.room.addresses())?;
        let (began, to_copy) = (Instant::now(), VecDeque::new());
        Ok(Live { image, state, clones, began, rounds: 0, to_copy, is_ripe: false, written: 0 })
    }

    /// One slice of it. Returns the report when it is whole.
    pub(crate) fn live_step(
        &mut self,
        live: &mut Live,
        pagemap: &Pagemap,
        uffd: &Uffd,
    ) -> Result<Option<LiveReport>, Error> {
        self.refuse_if_stopped()?;
        if live.is_ripe {
            return self.live_finish(live, pagemap, uffd).map(Some);
        }
        let mut slice = Vec::new();
        let mut left = SLICE;
        while left > 0
            && let Some(mut range) = live.to_copy.pop_front()
        {
            let end = range.end.min(range.start + left);
            left -= end - range.start;
            slice.push(range.start..end);
            range.start = end;
            if !range.is_empty() {
                live.to_copy.push_front(range);
            }
        }
        live.written += self.copy(&slice, &live.image)?;
        if !live.to_copy.is_empty() {
            return Ok(None);
        }
        // The balloon may have mapped something over a part since.
        let room = self.bus.room.addresses();
        uffd.register(&room)?;
        live.to_copy = pagemap.take_written(room)?.into();
        live.rounds += 1;
        let found: u64 = live.to_copy.iter().map(|range| range.end - range.start).sum();
        live.is_ripe = found <= LITTLE || live.rounds >= ROUNDS;
        Ok(None)
    }

    /// What has to be seen at one moment. The guest goes on whatever comes of it.
    fn live_finish(&mut self, live: &mut Live, pagemap: &Pagemap, uffd: &Uffd) -> Result<LiveReport, Error> {
        let ran = self.phase == Phase::Running;
        let paused_at = Instant::now();
        if ran {
            self.pause(Lasts::AMoment)?;
        }
        let frozen = self.freeze(live, pagemap, uffd);
        if ran {
            self.resume()?;
            self.let_run()?;
        }
        let pause = paused_at.elapsed();
        let (state, paused_bytes, cuts_connections) = frozen?;
        live.written += paused_bytes;
        live.state.write_all(&state.encode()?).host("write of the VM's state")?;
        let (written_bytes, total) = (live.written, live.began.elapsed());
        Ok(LiveReport { written_bytes, paused_bytes, pause, total, cuts_connections })
    }

    /// Of the paused VM: its state, how many bytes of memory were written, and whether connections are cut.
    fn freeze(&self, live: &mut Live, pagemap: &Pagemap, uffd: &Uffd) -> Result<(VmState, u64, bool), Error> {
        self.serve_all()?;
        let state = self.state(Transport::save_cut)?;
        let is_cut = state.devices.iter().any(|device| device.is_cut());
        let room = self.bus.room.addresses();
        uffd.register(&room)?;
        let mut rest = Vec::from(std::mem::take(&mut live.to_copy));
        // The last look: nobody asks again.
        rest.extend(pagemap.written(room.clone())?);
        let written = self.copy(&rest, &live.image)?;
        // What was given up reads as zero, but for the pages that were written since.
        for hole in self.given_up() {
            let mut at = hole.start;
            for private in pagemap.private_pages(room.start + hole.start..room.start + hole.end)? {
                punch(&live.image, at..private.start - room.start)?;
                at = private.end - room.start;
            }
            punch(&live.image, at..hole.end)?;
        }
        self.clone_disks(&live.clones)?;
        Ok((state, written, is_cut))
    }

    fn clone_disks(&self, clones: &[File]) -> Result<(), Error> {
        let mut clones = clones.iter();
        let mut next = clones.next();
        for device in &self.bus.virtio {
            let Some(clone) = next else { break };
            if lock(device).device().clone_disk(clone)? {
                next = clones.next();
            }
        }
        Ok(())
    }

    /// Host addresses, as the guest's, into the image.
    fn copy(&self, ranges: &[Range<u64>], image: &File) -> Result<u64, Error> {
        let start = self.bus.room.addresses().start;
        let ranges: Vec<_> = ranges.iter().map(|range| range.start - start..range.end - start).collect();
        memory::write_changes(&self.bus.memory, &ranges, image, None)
    }

    /// After the last step, or instead of it: the guest pays for no write any more.
    pub(crate) fn live_end(&self, uffd: &Uffd) -> Result<(), Error> {
        uffd.unregister(&self.bus.room.addresses())
    }
}

fn punch(image: &File, range: Range<u64>) -> Result<(), Error> {
    if range.is_empty() { Ok(()) } else { memory::punch(image, range.start, range.end - range.start) }
}
