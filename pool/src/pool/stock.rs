//! What a pool has, and who waits for it: counts and queues. Pure, so that it can be model-checked; [`actor`](super::actor) does what
//! follows.
//!
//! ```text
//!  restoring ─▶ paused ─▶ warming ─▶ hot
//!     │           ▲ │                 │      whoever waits takes what arrives; who comes takes hot, else paused
//!     │           │ └─────▶ claimed ◀─┘
//!     └─▶ claimed └─ rewinding ◀┘
//! ```

use std::collections::VecDeque;

use stasis_pool_api::BoundBy;

use super::target::Target;

/// A VM that may have ended.
pub(super) trait Vm {
    /// It can still be used.
    fn lives(&self) -> bool;
}

/// Somebody who may have left.
pub(super) trait Waiter {
    /// Nobody is there any more.
    fn has_left(&self) -> bool;
}

/// A VM that nobody has.
#[derive(Debug)]
pub(super) enum Ready<P, H> {
    /// As the template's snapshot has it.
    Paused(P),
    /// It runs, and has proved its repair.
    Hot(H),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Stock<P, H, W> {
    paused: VecDeque<P>,
    hot: VecDeque<H>,
    waiters: VecDeque<W>,
    /// VMs that are being restored.
    pub(super) restoring: u32,
    /// Used ones that are being brought back.
    pub(super) rewinding: u32,
    /// Paused ones that are being woken to be hot, and hot ones that get another connection.
    pub(super) warming: u32,
    /// Those that somebody has.
    pub(super) claimed: u32,
}

impl<P, H, W> Default for Stock<P, H, W> {
    fn default() -> Self {
        Self {
            paused: VecDeque::new(),
            hot: VecDeque::new(),
            waiters: VecDeque::new(),
            restoring: 0,
            rewinding: 0,
            warming: 0,
            claimed: 0,
        }
    }
}

impl<P: Vm, H: Vm, W: Waiter> Stock<P, H, W> {
    pub(super) fn paused(&self) -> &VecDeque<P> {
        &self.paused
    }

    pub(super) fn hot(&self) -> &VecDeque<H> {
        &self.hot
    }

    pub(super) fn hot_mut(&mut self) -> &mut VecDeque<H> {
        &mut self.hot
    }

    /// Claims that wait.
    pub(super) fn waiting(&self) -> u32 {
        count(self.waiters.len())
    }

    /// VMs that are ready, or will be without anyone's doing.
    pub(super) fn supply(&self) -> u32 {
        count(self.paused.len()) + count(self.hot.len()) + self.restoring + self.rewinding + self.warming
    }

    /// Somebody comes: takes what is hot, else what is paused, else waits.
    pub(super) fn claim(&mut self, waiter: W) -> Option<(W, Ready<P, H>)> {
        let hot = std::iter::from_fn(|| self.hot.pop_front()).find(Vm::lives).map(Ready::Hot);
        let vm = hot.or_else(|| std::iter::from_fn(|| self.paused.pop_front()).find(Vm::lives).map(Ready::Paused));
        match vm {
            Some(vm) => {
                self.claimed += 1;
                Some((waiter, vm))
            }
            None => {
                self.waiters.push_back(waiter);
                None
            }
        }
    }

    /// Which of the starts that wait for their turn, `in_line` of all being restored, somebody who comes now would need: 1 for the first. None
    /// where it needs no start, because a VM is ready or on its way, or gets none, because no more than `most` VMs may be there.
    pub(super) fn needs_start(&self, in_line: usize, most: u32) -> Option<usize> {
        if self.paused.iter().any(Vm::lives) || self.hot.iter().any(Vm::lives) {
            return None;
        }
        let in_line = count(in_line);
        let on_their_way = self.restoring.saturating_sub(in_line) + self.rewinding + self.warming;
        let nth = (self.waiting() + 1).checked_sub(on_their_way).filter(|nth| *nth > 0)?;
        let is_allowed = nth <= in_line || self.supply() + self.claimed < most;
        is_allowed.then_some(nth as usize)
    }

    /// A VM has become ready: it is for whoever waits longest, or for who comes next.
    pub(super) fn arrived(&mut self, vm: Ready<P, H>) -> Option<(W, Ready<P, H>)> {
        if let Some(waiter) = self.next_waiter() {
            self.claimed += 1;
            return Some((waiter, vm));
        }
        match vm {
            Ready::Paused(vm) => self.paused.push_back(vm),
            Ready::Hot(vm) => self.hot.push_back(vm),
        }
        None
    }

    /// One that was granted is there again, unused: for whoever waits longest, or for who comes next.
    pub(super) fn came_back(&mut self, vm: Ready<P, H>) -> Option<(W, Ready<P, H>)> {
        if let Some(waiter) = self.next_waiter() {
            self.claimed += 1;
            return Some((waiter, vm));
        }
        match vm {
            Ready::Paused(vm) => self.paused.push_front(vm),
            Ready::Hot(vm) => self.hot.push_front(vm),
        }
        None
    }

    /// Who waits longest.
    pub(super) fn next_waiter(&mut self) -> Option<W> {
        std::iter::from_fn(|| self.waiters.pop_front()).find(|waiter| !waiter.has_left())
    }

    /// Who has waited shortest.
    pub(super) fn last_waiter(&mut self) -> Option<W> {
        std::iter::from_fn(|| self.waiters.pop_back()).find(|waiter| !waiter.has_left())
    }

    /// Claims that wait for VMs which are neither there nor on their way.
    pub(super) fn unserved(&self) -> u32 {
        self.waiting().saturating_sub(self.supply())
    }

    /// A ready VM that is paused, to make room.
    pub(super) fn give_up_paused(&mut self) -> Option<P> {
        self.paused.pop_front()
    }

    /// Forgets those who have left.
    pub(super) fn tidy(&mut self) {
        self.waiters.retain(|waiter| !waiter.has_left());
    }

    /// VMs to restore now: enough for `ready` and for all who wait, as far as `most` allows.
    pub(super) fn missing(&self, ready: u32, most: u32) -> u32 {
        let supply = self.supply();
        let missing = (ready + self.waiting()).saturating_sub(supply);
        missing.min(most.saturating_sub(supply + self.claimed))
    }

    /// Whether a used VM will find a use, if so many are to be kept.
    pub(super) fn wants_back(&self, keep: u32) -> bool {
        self.supply() < keep + self.waiting()
    }

    /// A ready VM beyond those to keep. Paused ones go first.
    pub(super) fn beyond(&mut self, keep: u32) -> Option<Ready<P, H>> {
        if self.supply() <= keep + self.waiting() {
            return None;
        }
        let paused = self.paused.pop_front().map(Ready::Paused);
        paused.or_else(|| self.hot.pop_front().map(Ready::Hot))
    }

    /// A hot VM beyond those to keep hot.
    pub(super) fn beyond_hot(&mut self, keep: u32) -> Option<H> {
        if count(self.hot.len()) > keep { self.hot.pop_front() } else { None }
    }

    /// How many more could be made hot now.
    pub(super) fn short_of_hot(&self, hot: u32) -> u32 {
        hot.saturating_sub(count(self.hot.len()) + self.warming).min(count(self.paused.len()))
    }

    /// A paused VM to make hot, unless somebody waits: claims come first.
    pub(super) fn warm(&mut self, hot: u32) -> Option<P> {
        if !self.waiters.is_empty() || self.short_of_hot(hot) == 0 {
            return None;
        }
        let vm = std::iter::from_fn(|| self.paused.pop_front()).find(Vm::lives)?;
        self.warming += 1;
        Some(vm)
    }

    /// Takes a hot VM out.
    pub(super) fn remove_hot(&mut self, place: usize) -> Option<H> {
        self.hot.remove(place)
    }

    /// Drops those that have ended; how many.
    pub(super) fn bury(&mut self) -> usize {
        let before = self.paused.len() + self.hot.len();
        self.paused.retain(Vm::lives);
        self.hot.retain(Vm::lives);
        before - self.paused.len() - self.hot.len()
    }

    /// It has been idle for long, nothing is there, and nobody has or wants anything.
    pub(super) fn may_end(&self, target: &Target) -> bool {
        target.bound_by == Some(BoundBy::Idle) && self.supply() + self.claimed + self.waiting() == 0
    }
}

pub(super) fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
