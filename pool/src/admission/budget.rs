//! The node's budgets: sums only. Whoever may have something is decided here, by one rule.
//!
//! ```text
//! memory:  committed + expected dirty + shared images  <=  limit        vCPUs:  committed  <=  cores x overcommit
//! ```
//!
//! A VM that may run counts as *committed*, with all of its guest's memory and its vCPUs: it may use both. One that stands ready has not
//! run since its restore or rewind and cannot write, so it counts with what a life of its template is expected to write, which is more
//! than it has written itself. Before it may run its charge is exchanged for the full one, or it does not run: should the expectation be
//! wrong, a claim is refused, and no memory is promised twice.
//!
//! Beside what is held *now* stand the same sums as they will be *later*, once all that is under way has been done, and all has been given
//! up that is given up when it is asked for: VMs that end, are rewound or hibernated, or stand ready beyond what their pool keeps. Whoever is
//! refused has hope if it will be granted then, behind those who wait in the line before it:
//!
//! ```text
//! granted:  now + wanted + ahead in line  <=  limit        has hope:  later + wanted + ahead in line  <=  limit
//! ```
//! Who has hope may wait for the events that bring it; who has none is refused at once.

use std::{collections::BTreeMap, sync::Arc};

use stasis_pool_api::{NoCapacity, Resource};

/// What there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Bytes.
    pub(crate) memory: u64,
    pub(crate) vcpus: u64,
}

/// An image that VMs share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Image {
    /// Names it.
    pub(crate) digest: Arc<str>,
    /// What of it is not zero.
    pub(crate) bytes: u64,
}

/// What somebody has, or wants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Charge {
    /// Bytes that it may use.
    pub(crate) committed: u64,
    /// Bytes that it is expected to have used once it runs, while it does not.
    pub(crate) expected_dirty: u64,
    pub(crate) vcpus: u64,
    pub(crate) image: Option<Image>,
}

impl Charge {
    /// Of so many such VMs, which share one image.
    fn times(&self, vms: u32) -> Self {
        let vms = u64::from(vms);
        Self {
            committed: self.committed.saturating_mul(vms),
            expected_dirty: self.expected_dirty.saturating_mul(vms),
            vcpus: self.vcpus.saturating_mul(vms),
            image: self.image.clone().filter(|_| vms > 0),
        }
    }
}

/// What somebody has, and what of it will be left when what is under way has been done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Holding {
    pub(crate) now: Charge,
    pub(crate) later: Charge,
}

impl Holding {
    /// It keeps what it has.
    pub(crate) fn of(charge: Charge) -> Self {
        Self { later: charge.clone(), now: charge }
    }
}

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asker {
    /// Somebody who comes: all who wait in the line are before it.
    New,
    /// Who waits in the line under this number.
    InLine(u64),
    /// It lives already, and is never refused: a node that is started again may have less than before.
    Living,
}

/// Why somebody was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) full: NoCapacity,
    /// How much must come back before it can be granted: bytes, or vCPUs.
    pub(crate) missing: u64,
    /// That much is on its way back.
    pub(crate) has_hope: bool,
}

/// So much of each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    pub(crate) bytes: u64,
    pub(crate) vcpus: u64,
}

impl Amount {
    /// What is left of it without the other: of each at least nothing.
    pub(crate) const fn without(self, other: Self) -> Self {
        Self { bytes: self.bytes.saturating_sub(other.bytes), vcpus: self.vcpus.saturating_sub(other.vcpus) }
    }
}

impl std::iter::Sum for Amount {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::default(), |sum, one| Self { bytes: sum.bytes + one.bytes, vcpus: sum.vcpus + one.vcpus })
    }
}

/// A sum of charges.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Charges {
    committed: u64,
    expected_dirty: u64,
    vcpus: u64,
    /// Bytes, and how many VMs share them.
    images: BTreeMap<Arc<str>, (u64, u64)>,
}

impl Charges {
    fn take(&mut self, charge: &Charge) {
        self.committed += charge.committed;
        self.expected_dirty += charge.expected_dirty;
        self.vcpus += charge.vcpus;
        if let Some(image) = &charge.image {
            self.images.entry(Arc::clone(&image.digest)).or_insert((image.bytes, 0)).1 += 1;
        }
    }

    fn give(&mut self, charge: &Charge) {
        self.committed -= charge.committed;
        self.expected_dirty -= charge.expected_dirty;
        self.vcpus -= charge.vcpus;
        if let Some(image) = &charge.image
            && let Some((_, users)) = self.images.get_mut(&image.digest)
        {
            *users -= 1;
            if *users == 0 {
                self.images.remove(&image.digest);
            }
        }
    }

    /// Images in the page cache, each once.
    fn shared(&self) -> u64 {
        self.images.values().map(|(bytes, _)| bytes).sum()
    }

    fn amount(&self) -> Amount {
        Amount { bytes: self.committed + self.expected_dirty + self.shared(), vcpus: self.vcpus }
    }

    /// What there would be with `wanted` in the place of `held`.
    fn amount_with(&self, held: &Charge, wanted: &Charge) -> Amount {
        let mut other = self.clone();
        other.give(held);
        other.take(wanted);
        other.amount()
    }
}

/// What of the limits is promised, now and later, and who waits for more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Budget {
    limits: Limits,
    now: Charges,
    later: Charges,
    /// What each waits for, in the order of their coming: what comes back is theirs first, or refills would take it bit by bit.
    line: BTreeMap<u64, Amount>,
    next_number: u64,
}

impl Budget {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, now: Charges::default(), later: Charges::default(), line: BTreeMap::new(), next_number: 0 }
    }

    /// Gives `held` back and takes `wanted`, both or neither. What does not grow is never refused.
    pub(crate) fn exchange(&mut self, held: &Holding, wanted: &Holding, asker: Asker) -> Result<(), Refused> {
        let before = self.now.amount();
        self.swap(held, wanted);
        let after = self.now.amount();
        if asker == Asker::Living || self.lacking([before, after], asker).is_none() {
            return Ok(());
        }
        self.swap(wanted, held);
        let then = [&held.now, &wanted.now].map(|has| self.later.amount_with(&held.later, has));
        self.judged([before, after], then, asker)
    }

    /// Whether so many VMs of this charge can be had, be it when what is on its way has come back.
    pub(crate) fn foresee(&self, charge: &Charge, vms: u32, asker: Asker) -> Result<(), Refused> {
        let (none, wanted) = (Charge::default(), charge.times(vms));
        let [now, then] = [&self.now, &self.later].map(|sum| [sum.amount(), sum.amount_with(&none, &wanted)]);
        match self.judged(now, then, asker) {
            Err(refused) if !refused.has_hope => Err(refused),
            _ => Ok(()),
        }
    }

    /// May what all have grow so `now`? If not, may it `then`?
    fn judged(&self, now: [Amount; 2], then: [Amount; 2], asker: Asker) -> Result<(), Refused> {
        let Some((full, missing)) = self.lacking(now, asker) else { return Ok(()) };
        Err(Refused { full, missing, has_hope: self.lacking(then, asker).is_none() })
    }

    /// What is not there for a growth from `before` to `after`, and how much of it must come back.
    fn lacking(&self, [before, after]: [Amount; 2], asker: Asker) -> Option<(NoCapacity, u64)> {
        let ahead = self.ahead(asker);
        let checks = [
            (Resource::Memory, before.bytes, after.bytes, ahead.bytes, self.limits.memory),
            (Resource::Vcpus, before.vcpus, after.vcpus, ahead.vcpus, self.limits.vcpus),
        ];
        checks.into_iter().find_map(|(resource, before, after, ahead, limit)| {
            let missing = after.saturating_add(ahead).saturating_sub(limit);
            let available = limit.saturating_sub(ahead).saturating_sub(before);
            let full = NoCapacity { resource, needed: after.saturating_sub(before), available, limit };
            (after > before && missing > 0).then_some((full, missing))
        })
    }

    fn swap(&mut self, held: &Holding, wanted: &Holding) {
        self.now.give(&held.now);
        self.now.take(&wanted.now);
        self.later.give(&held.later);
        self.later.take(&wanted.later);
    }

    /// What those wait for who are before somebody.
    fn ahead(&self, asker: Asker) -> Amount {
        match asker {
            Asker::New => self.line.values().copied().sum(),
            Asker::InLine(number) => self.line.range(..number).map(|(_, amount)| *amount).sum(),
            Asker::Living => Amount::default(),
        }
    }

    /// Puts somebody at the line's end who waits for so much more; the number there.
    pub(crate) fn line_up(&mut self, amount: Amount) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        self.line.insert(number, amount);
        number
    }

    /// The opposite.
    pub(crate) fn leave(&mut self, number: u64) {
        self.line.remove(&number);
    }

    /// What all wait for in the line.
    pub(crate) fn waited_for(&self) -> Amount {
        self.ahead(Asker::New)
    }

    /// What is on its way back.
    pub(crate) fn returning(&self) -> Amount {
        self.now.amount().without(self.later.amount())
    }

    /// Nobody gets anything more.
    pub(crate) const fn close(&mut self) {
        self.limits = Limits { memory: 0, vcpus: 0 };
    }

    pub(crate) const fn limits(&self) -> Limits {
        self.limits
    }

    pub(crate) const fn committed(&self) -> u64 {
        self.now.committed
    }

    pub(crate) const fn expected_dirty(&self) -> u64 {
        self.now.expected_dirty
    }

    pub(crate) fn shared(&self) -> u64 {
        self.now.shared()
    }

    /// All that is promised now, and what of it will be later.
    pub(crate) fn promised(&self) -> [Amount; 2] {
        [self.now.amount(), self.later.amount()]
    }

    pub(crate) fn free(&self) -> u64 {
        self.limits.memory.saturating_sub(self.now.amount().bytes)
    }

    /// Nobody has anything.
    pub(crate) fn is_unused(&self) -> bool {
        self.now == Charges::default()
    }
}

#[cfg(test)]
mod tests;
