//! The node's budgets: sums only. Whoever may have something is decided here, by one rule.
//!
//! ```text
//! memory:  committed + expected dirty + shared images  <=  limit        vCPUs:  committed  <=  cores x overcommit
//! ```
//!
//! A VM that may run counts as *committed*, with all of its guest's memory and its vCPUs: it may use both. One that stands ready has not
//! run since its restore or rewind and cannot write, so it counts with what a life of its template is expected to write, which is more
//! than it has written itself. Before it may run its charge is exchanged for the full one, or it does not run: should the expectation be
//! wrong, a claim waits, and no memory is promised twice.

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

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// Somebody waits for a VM that is there and may not run yet: it may have what was set aside.
    Claim,
    /// All others.
    Start,
    /// It lives already, and is never refused: a node that is started again may have less than before.
    Living,
}

/// What of the limits is promised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Budget {
    limits: Limits,
    committed: u64,
    expected_dirty: u64,
    vcpus: u64,
    /// Bytes, and how many VMs share them.
    images: BTreeMap<Arc<str>, (u64, u64)>,
    /// Memory that claims wait for: what comes free is theirs first, or refills would take it bit by bit.
    aside: u64,
}

impl Budget {
    pub(crate) const fn new(limits: Limits) -> Self {
        Self { limits, committed: 0, expected_dirty: 0, vcpus: 0, images: BTreeMap::new(), aside: 0 }
    }

    /// Gives `held` back and takes `wanted`, both or neither. What does not grow is never refused.
    pub(crate) fn exchange(&mut self, held: &Charge, wanted: &Charge, urgency: Urgency) -> Result<(), NoCapacity> {
        let (memory, vcpus) = (self.promised(), self.vcpus);
        self.give(held);
        self.take(wanted);
        let limit = match urgency {
            Urgency::Claim => self.limits.memory,
            Urgency::Start => self.limits.memory.saturating_sub(self.aside),
            Urgency::Living => return Ok(()),
        };
        let checks = [
            (Resource::Memory, memory, self.promised(), limit, self.limits.memory),
            (Resource::Vcpus, vcpus, self.vcpus, self.limits.vcpus, self.limits.vcpus),
        ];
        let refused = checks.into_iter().find(|(_, before, after, limit, _)| after > before && after > limit);
        let Some((resource, before, after, limit, whole)) = refused else { return Ok(()) };
        self.give(wanted);
        self.take(held);
        Err(NoCapacity { resource, needed: after - before, available: limit.saturating_sub(before), limit: whole })
    }

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

    /// Keeps so much of what comes free for claims.
    pub(crate) const fn set_aside(&mut self, bytes: u64) {
        self.aside += bytes;
    }

    /// The opposite.
    pub(crate) const fn release_aside(&mut self, bytes: u64) {
        self.aside -= bytes;
    }

    /// Nobody gets anything more.
    pub(crate) const fn close(&mut self) {
        self.limits = Limits { memory: 0, vcpus: 0 };
    }

    pub(crate) const fn limits(&self) -> Limits {
        self.limits
    }

    pub(crate) const fn committed(&self) -> u64 {
        self.committed
    }

    pub(crate) const fn expected_dirty(&self) -> u64 {
        self.expected_dirty
    }

    pub(crate) const fn vcpus(&self) -> u64 {
        self.vcpus
    }

    /// Images in the page cache, each once.
    pub(crate) fn shared(&self) -> u64 {
        self.images.values().map(|(bytes, _)| bytes).sum()
    }

    /// Memory that is promised in all.
    pub(crate) fn promised(&self) -> u64 {
        self.committed + self.expected_dirty + self.shared()
    }

    pub(crate) fn free(&self) -> u64 {
        self.limits.memory.saturating_sub(self.promised())
    }

    /// Nobody has anything.
    pub(crate) fn is_unused(&self) -> bool {
        self.promised() == 0 && self.vcpus == 0 && self.images.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { memory: 1000, vcpus: 10 };

    fn charge(committed: u64, expected_dirty: u64, vcpus: u64, image: Option<(&str, u64)>) -> Charge {
        let image = image.map(|(digest, bytes)| Image { digest: digest.into(), bytes });
        Charge { committed, expected_dirty, vcpus, image }
    }

    fn refusal(resource: Resource, needed: u64, available: u64, limit: u64) -> Result<(), NoCapacity> {
        Err(NoCapacity { resource, needed, available, limit })
    }

    #[test]
    fn an_image_counts_once_and_a_paused_vm_must_be_promised_all_before_it_runs() {
        let mut budget = Budget::new(LIMITS);
        let (none, image) = (Charge::default(), Some(("t", 300)));
        let (paused, running) = (charge(0, 50, 0, image), charge(400, 0, 1, image));
        for _ in 0..3 {
            budget.exchange(&none, &paused, Urgency::Start).unwrap();
        }
        assert_eq!((budget.expected_dirty(), budget.shared(), budget.free()), (150, 300, 550));
        budget.exchange(&paused, &running, Urgency::Claim).unwrap();
        assert_eq!((budget.committed(), budget.expected_dirty(), budget.vcpus(), budget.free()), (400, 100, 1, 200));
        let before = budget.clone();
        let refused = budget.exchange(&paused, &running, Urgency::Claim);
        assert_eq!(refused, refusal(Resource::Memory, 350, 200, 1000));
        assert_eq!(budget, before, "neither was done");
        budget.exchange(&running, &paused, Urgency::Start).unwrap();
        budget.exchange(&paused, &running, Urgency::Claim).unwrap();
    }

    #[test]
    fn the_resource_that_is_short_is_the_one_named() {
        let mut budget = Budget::new(LIMITS);
        let none = Charge::default();
        let refused = budget.exchange(&none, &charge(1, 0, 11, None), Urgency::Claim);
        assert_eq!(refused, refusal(Resource::Vcpus, 11, 10, 10));
        let refused = budget.exchange(&none, &charge(900, 0, 1, Some(("t", 101))), Urgency::Claim);
        assert_eq!(refused, refusal(Resource::Memory, 1001, 1000, 1000));
        assert!(budget.is_unused());
    }

    #[test]
    fn what_claims_wait_for_is_not_given_to_others() {
        let mut budget = Budget::new(LIMITS);
        let none = Charge::default();
        budget.set_aside(800);
        let refused = budget.exchange(&none, &charge(0, 300, 0, None), Urgency::Start);
        assert_eq!(refused, refusal(Resource::Memory, 300, 200, 1000));
        budget.exchange(&none, &charge(800, 0, 1, None), Urgency::Claim).unwrap();
        budget.release_aside(800);
        budget.exchange(&none, &charge(0, 200, 0, None), Urgency::Start).unwrap();
    }

    #[test]
    fn a_closed_one_gives_nothing_and_takes_all_back() {
        let mut budget = Budget::new(LIMITS);
        let (none, some) = (Charge::default(), charge(10, 0, 1, Some(("t", 5))));
        budget.exchange(&none, &some, Urgency::Start).unwrap();
        budget.close();
        assert!(budget.exchange(&none, &charge(1, 0, 0, None), Urgency::Claim).is_err());
        budget.exchange(&some, &none, Urgency::Start).unwrap();
        assert!(budget.is_unused());
    }

    fn any_charge() -> impl Strategy<Value = Charge> {
        // Every image has one size, as every digest has.
        let image = prop::option::of(prop::sample::select(vec![("a", 100), ("b", 250), ("c", 0)]));
        (0..600u64, 0..300u64, 0..8u64, image).prop_map(|(all, dirty, vcpus, image)| charge(all, dirty, vcpus, image))
    }

    proptest! {
        /// Up to six VMs whose charges change at random, `None` being their end.
        #[test]
        fn never_over_the_limit_and_what_is_given_back_is_what_was_taken(
            steps in prop::collection::vec((0..6usize, prop::option::of(any_charge()), prop::bool::ANY), 1..200),
        ) {
            let mut budget = Budget::new(LIMITS);
            let mut held = vec![Charge::default(); 6];
            for (who, wanted, urgent) in steps {
                let wanted = wanted.unwrap_or_default();
                let before = budget.clone();
                let urgency = if urgent { Urgency::Claim } else { Urgency::Start };
                match budget.exchange(&held[who], &wanted, urgency) {
                    Ok(()) => held[who] = wanted,
                    Err(refused) => {
                        prop_assert_eq!(&budget, &before);
                        prop_assert!(refused.needed > refused.available);
                        prop_assert!(wanted != Charge::default(), "giving all back is never refused");
                        let (grown, limit) = match refused.resource {
                            Resource::Memory => (before.free(), LIMITS.memory),
                            Resource::Vcpus => (LIMITS.vcpus - before.vcpus(), LIMITS.vcpus),
                            Resource::Starts => unreachable!("the line's, not the budget's"),
                        };
                        prop_assert_eq!((refused.available, refused.limit), (grown, limit));
                    }
                }
                prop_assert!(budget.promised() <= LIMITS.memory && budget.vcpus() <= LIMITS.vcpus);
                let committed: u64 = held.iter().map(|charge| charge.committed).sum();
                let dirty: u64 = held.iter().map(|charge| charge.expected_dirty).sum();
                let vcpus: u64 = held.iter().map(|charge| charge.vcpus).sum();
                prop_assert_eq!((budget.committed(), budget.expected_dirty(), budget.vcpus()), (committed, dirty, vcpus));
                let images: BTreeMap<_, _> =
                    held.iter().filter_map(|charge| charge.image.as_ref()).map(|image| (&image.digest, image.bytes)).collect();
                prop_assert_eq!(budget.shared(), images.values().sum::<u64>());
            }
            for charge in &held {
                budget.exchange(charge, &Charge::default(), Urgency::Start).unwrap();
            }
            prop_assert!(budget.is_unused());
        }
    }
}
