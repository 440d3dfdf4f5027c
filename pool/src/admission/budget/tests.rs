use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits { memory: 1000, vcpus: 10 };

fn charge(committed: u64, expected_dirty: u64, vcpus: u64, image: Option<(&str, u64)>) -> Charge {
    let image = image.map(|(digest, bytes)| Image { digest: digest.into(), bytes });
    Charge { committed, expected_dirty, vcpus, image }
}

fn held(charge: &Charge) -> Holding {
    Holding::of(charge.clone())
}

/// It has this, and keeps nothing of it.
fn leaving(charge: &Charge) -> Holding {
    Holding { now: charge.clone(), later: Charge::default() }
}

impl Budget {
    /// Of somebody who comes, with nothing under way.
    fn change(&mut self, from: &Charge, to: &Charge) -> Result<(), Refused> {
        self.exchange(&held(from), &held(to), Asker::New)
    }
}

fn refusal(resource: Resource, needed: u64, available: u64, limit: u64) -> NoCapacity {
    NoCapacity { resource, needed, available, limit }
}

#[test]
fn an_image_counts_once_and_a_paused_vm_must_be_promised_all_before_it_runs() {
    let mut budget = Budget::new(LIMITS);
    let (none, image) = (Charge::default(), Some(("t", 300)));
    let (paused, running) = (charge(0, 50, 0, image), charge(400, 0, 1, image));
    for _ in 0..3 {
        budget.change(&none, &paused).unwrap();
    }
    assert_eq!((budget.expected_dirty(), budget.shared(), budget.free()), (150, 300, 550));
    budget.change(&paused, &running).unwrap();
    let now = budget.promised()[0];
    assert_eq!((budget.committed(), budget.expected_dirty(), now.vcpus, budget.free()), (400, 100, 1, 200));
    let before = budget.clone();
    let refused = budget.change(&paused, &running).unwrap_err();
    assert_eq!((refused.full, refused.missing), (refusal(Resource::Memory, 350, 200, 1000), 150));
    assert_eq!(budget, before, "neither was done");
    budget.change(&running, &paused).unwrap();
    budget.change(&paused, &running).unwrap();
}

#[test]
fn the_resource_that_is_short_is_the_one_named() {
    let mut budget = Budget::new(LIMITS);
    let none = Charge::default();
    let refused = budget.change(&none, &charge(1, 0, 11, None)).unwrap_err();
    assert_eq!((refused.full, refused.missing), (refusal(Resource::Vcpus, 11, 10, 10), 1));
    let refused = budget.change(&none, &charge(900, 0, 1, Some(("t", 101)))).unwrap_err();
    assert_eq!((refused.full, refused.missing), (refusal(Resource::Memory, 1001, 1000, 1000), 1));
    assert!(budget.is_unused());
}

#[test]
fn what_is_waited_for_is_not_given_to_those_behind() {
    let mut budget = Budget::new(LIMITS);
    let none = Charge::default();
    let first = budget.line_up(Amount { bytes: 800, vcpus: 9 });
    let second = budget.line_up(Amount { bytes: 300, vcpus: 1 });
    for asker in [Asker::New, Asker::InLine(second)] {
        let refused = budget.exchange(&held(&none), &held(&charge(0, 300, 0, None)), asker).unwrap_err();
        assert_eq!(refused.full.resource, Resource::Memory);
    }
    let refused = budget.exchange(&held(&none), &held(&charge(0, 10, 2, None)), Asker::InLine(second)).unwrap_err();
    assert_eq!((refused.full, refused.missing), (refusal(Resource::Vcpus, 2, 1, 10), 1));
    budget.exchange(&held(&none), &held(&charge(800, 0, 1, None)), Asker::InLine(first)).unwrap();
    budget.leave(first);
    budget.exchange(&held(&none), &held(&charge(0, 200, 0, None)), Asker::InLine(second)).unwrap();
}

#[test]
fn hope_is_what_comes_back_and_is_promised_to_nobody_before() {
    let (none, vm, image) = (Charge::default(), charge(300, 0, 3, None), Some(("t", 100)));
    let mut budget = Budget::new(LIMITS);
    for _ in 0..3 {
        budget.change(&none, &vm).unwrap();
    }
    assert!(!budget.change(&none, &vm).unwrap_err().has_hope, "all of it is used");
    budget.exchange(&held(&vm), &leaving(&vm), Asker::New).unwrap();
    assert!(budget.change(&none, &vm).unwrap_err().has_hope, "one of them ends");
    assert_eq!(budget.returning(), Amount { bytes: 300, vcpus: 3 });
    budget.foresee(&vm, 1, Asker::New).unwrap();
    assert_eq!(budget.foresee(&vm, 2, Asker::New).unwrap_err().full.needed, 600);
    let first = budget.line_up(Amount { bytes: 300, vcpus: 3 });
    assert!(!budget.change(&none, &vm).unwrap_err().has_hope, "it is somebody else's");
    assert!(budget.exchange(&held(&none), &held(&vm), Asker::InLine(first)).unwrap_err().has_hope);
    budget.leave(first);
    // It is used after all.
    budget.exchange(&leaving(&vm), &held(&vm), Asker::New).unwrap();
    assert!(!budget.change(&none, &vm).unwrap_err().has_hope);
    // An image goes with the last that uses it.
    budget.change(&vm, &none).unwrap();
    let sharing = charge(50, 0, 1, image);
    budget.change(&none, &sharing).unwrap();
    budget.change(&none, &sharing).unwrap();
    budget.exchange(&held(&sharing), &leaving(&sharing), Asker::New).unwrap();
    assert!(!budget.change(&none, &charge(300, 0, 0, None)).unwrap_err().has_hope);
    budget.exchange(&held(&sharing), &leaving(&sharing), Asker::New).unwrap();
    assert!(budget.change(&none, &charge(300, 0, 0, None)).unwrap_err().has_hope);
}

#[test]
fn a_closed_one_gives_nothing_and_takes_all_back() {
    let mut budget = Budget::new(LIMITS);
    let (none, some) = (Charge::default(), charge(10, 0, 1, Some(("t", 5))));
    budget.change(&none, &some).unwrap();
    budget.close();
    assert!(!budget.change(&none, &charge(1, 0, 0, None)).unwrap_err().has_hope);
    budget.change(&some, &none).unwrap();
    assert!(budget.is_unused());
}

fn any_charge() -> impl Strategy<Value = Charge> {
    // Every image has one size, as every digest has.
    let image = prop::option::of(prop::sample::select(vec![("a", 100), ("b", 250), ("c", 0)]));
    (0..600u64, 0..300u64, 0..8u64, image).prop_map(|(all, dirty, vcpus, image)| charge(all, dirty, vcpus, image))
}

/// What one of six VMs does.
#[derive(Debug, Clone)]
enum Step {
    /// It is to have this; nothing is its end.
    Change(Charge),
    /// It is on its way back, to this much of nothing.
    Leaves,
    /// It is not, after all.
    Stays,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => any_charge().prop_map(Step::Change),
        1 => Just(Step::Change(Charge::default())),
        3 => Just(Step::Leaves),
        1 => Just(Step::Stays),
    ]
}

fn sum(charges: impl Iterator<Item = Charge>) -> Amount {
    let mut images = BTreeMap::new();
    let mut amount = Amount::default();
    for charge in charges {
        amount.bytes += charge.own_bytes();
        amount.vcpus += charge.vcpus;
        images.extend(charge.image.map(|image| (image.digest, image.bytes)));
    }
    amount.bytes += images.values().sum::<u64>();
    amount
}

proptest! {
    /// Whoever is refused is refused for what is not there, and has hope just if it would be granted if all that is on its way back were back.
    #[test]
    fn never_over_the_limit_and_hope_is_what_comes_true(
        steps in prop::collection::vec((0..6usize, any_step()), 1..200),
        line in prop::collection::vec((0..200u64, 0..2u64), 0..3),
    ) {
        let mut budget = Budget::new(LIMITS);
        for (bytes, vcpus) in &line {
            budget.line_up(Amount { bytes: *bytes, vcpus: *vcpus });
        }
        let ahead = budget.waited_for();
        let mut vms = vec![Holding::default(); 6];
        for (who, step) in steps {
            let wanted = match step {
                Step::Change(charge) => Holding::of(charge),
                Step::Leaves => leaving(&vms[who].now),
                Step::Stays => Holding::of(vms[who].now.clone()),
            };
            let before = budget.clone();
            match budget.exchange(&vms[who], &wanted, Asker::New) {
                Ok(()) => vms[who] = wanted,
                Err(refused) => {
                    prop_assert_eq!(&budget, &before);
                    prop_assert!(refused.full.needed > refused.full.available && refused.missing > 0);
                    prop_assert!(refused.missing >= refused.full.needed - refused.full.available);
                    prop_assert!(wanted.now != vms[who].now && wanted.now != Charge::default(), "what does not grow is refused");
                    // All that is on its way back comes back.
                    let mut later = Budget::new(LIMITS);
                    later.line = before.line.clone();
                    for (one, vm) in vms.iter().enumerate() {
                        let left = if one == who { &vm.now } else { &vm.later };
                        later.exchange(&Holding::default(), &held(left), Asker::Living).unwrap();
                    }
                    let comes_true = later.exchange(&held(&vms[who].now), &wanted, Asker::New).is_ok();
                    prop_assert_eq!(refused.has_hope, comes_true);
                    // Nobody before it: never less hope.
                    let mut first = before.clone();
                    let alone = first.exchange(&vms[who], &wanted, Asker::InLine(0));
                    prop_assert!(!refused.has_hope || alone.is_ok() || alone.is_err_and(|refused| refused.has_hope));
                }
            }
            let [now, later] = budget.promised();
            prop_assert_eq!(now, sum(vms.iter().map(|vm| vm.now.clone())));
            prop_assert_eq!(later, sum(vms.iter().map(|vm| vm.later.clone())));
            prop_assert!(now.bytes + ahead.bytes <= LIMITS.memory.max(ahead.bytes));
            prop_assert!(now.vcpus + ahead.vcpus <= LIMITS.vcpus.max(ahead.vcpus));
        }
        for vm in &vms {
            budget.exchange(vm, &Holding::default(), Asker::New).unwrap();
        }
        prop_assert!(budget.is_unused());
    }

    #[test]
    fn what_is_foreseen_is_what_can_be_had_one_by_one(
        there in prop::collection::vec((any_charge(), any::<bool>()), 0..4),
        wanted in any_charge(),
        vms in 1..5u32,
    ) {
        let (mut budget, mut later) = (Budget::new(LIMITS), Budget::new(LIMITS));
        for (charge, leaves) in there {
            let holding = if leaves { leaving(&charge) } else { held(&charge) };
            budget.exchange(&Holding::default(), &holding, Asker::Living).unwrap();
            later.exchange(&Holding::default(), &held(&holding.later), Asker::Living).unwrap();
        }
        let foreseen = budget.foresee(&wanted, vms, Asker::New).is_ok();
        let had = |budget: &mut Budget| (0..vms).all(|_| budget.change(&Charge::default(), &wanted).is_ok());
        prop_assert_eq!(foreseen, had(&mut budget) || had(&mut later));
    }
}
