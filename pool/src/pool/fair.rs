//! Who is next: jobs of several flows share a capacity, by weight. Pure; [`turns`](super::turns) hands the turns out.
//!
//! Start-time fair queueing (Goyal, Vin and Cheng, 1996): each job takes `1/weight` of its flow's virtual time, and the job whose time
//! begins first is next. A flow that was away gains nothing by it. Urgent jobs come before all others, by the same rule among themselves.

use std::collections::{BTreeMap, VecDeque};

/// Virtual time of a job of weight 1.
const JOB: u64 = 1 << 32;

/// The queue.
#[derive(Debug)]
pub(crate) struct Fair<J> {
    capacity: usize,
    running: usize,
    waiting: usize,
    flows: BTreeMap<u64, Flow<J>>,
    clock: u64,
}

#[derive(Debug)]
struct Flow<J> {
    weight: u32,
    /// When its next job begins, in virtual time.
    start: u64,
    urgent: VecDeque<J>,
    others: VecDeque<J>,
}

impl<J> Flow<J> {
    fn is_empty(&self) -> bool {
        self.waiting() == 0
    }

    fn waiting(&self) -> usize {
        self.urgent.len() + self.others.len()
    }
}

impl<J> Fair<J> {
    /// For so many jobs at a time.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(1), running: 0, waiting: 0, flows: BTreeMap::new(), clock: 0 }
    }

    /// Puts a job behind those of its flow.
    pub(crate) fn push(&mut self, flow: u64, weight: u32, job: J, urgent: bool) {
        let clock = self.clock;
        let new = || Flow { weight, start: clock, urgent: VecDeque::new(), others: VecDeque::new() };
        let flow = self.flows.entry(flow).or_insert_with(new);
        if flow.is_empty() {
            flow.start = flow.start.max(clock);
        }
        flow.weight = weight.max(1);
        if urgent {
            flow.urgent.push_back(job)
        } else {
            flow.others.push_back(job)
        }
        self.waiting += 1;
    }

    /// Somebody waits for what this many of the flow's jobs will bring: that many are urgent.
    pub(crate) fn hurry(&mut self, flow: u64, urgent: usize) {
        if let Some(flow) = self.flows.get_mut(&flow) {
            while flow.urgent.len() < urgent
                && let Some(job) = flow.others.pop_front()
            {
                flow.urgent.push_back(job);
            }
        }
    }

    /// The job that may begin now. It runs until [`done`](Self::done) is called for it.
    pub(crate) fn next(&mut self) -> Option<J> {
        if self.running >= self.capacity {
            return None;
        }
        let earliest = |flows: &BTreeMap<u64, Flow<J>>, has: fn(&Flow<J>) -> bool| {
            flows.iter().filter(|(_, flow)| has(flow)).min_by_key(|(id, flow)| (flow.start, **id)).map(|(id, _)| *id)
        };
        let first = earliest(&self.flows, |flow| !flow.is_empty())?;
        let chosen = earliest(&self.flows, |flow| !flow.urgent.is_empty()).unwrap_or(first);
        self.clock = self.clock.max(self.flows.get(&first)?.start);
        let flow = self.flows.get_mut(&chosen)?;
        let job = flow.urgent.pop_front().or_else(|| flow.others.pop_front())?;
        flow.start = flow.start.saturating_add(JOB / u64::from(flow.weight));
        self.running += 1;
        self.waiting -= 1;
        // One that has gone away and owes nothing any more is forgotten.
        let clock = self.clock;
        self.flows.retain(|_, flow| !flow.is_empty() || flow.start > clock);
        Some(job)
    }

    /// A job that ran has ended.
    pub(crate) fn done(&mut self) {
        self.running = self.running.saturating_sub(1);
    }

    /// How many may run at a time, and run.
    pub(crate) const fn state(&self) -> (usize, usize) {
        (self.capacity, self.running)
    }

    /// Jobs that wait.
    pub(crate) const fn waiting(&self) -> usize {
        self.waiting
    }

    /// Those of one flow.
    pub(crate) fn waiting_of(&self, flow: u64) -> usize {
        self.flows.get(&flow).map_or(0, Flow::waiting)
    }

    /// How many jobs that wait now will begin before the flow's `nth` urgent one, 1 for the first, if nothing is pushed but that.
    pub(crate) fn ahead(&self, id: u64, weight: u32, nth: usize) -> usize {
        let start = match self.flows.get(&id) {
            Some(flow) if !flow.is_empty() => flow.start,
            Some(flow) => flow.start.max(self.clock),
            None => self.clock,
        };
        let before = nth.saturating_sub(1);
        let begins = start.saturating_add((before as u64).saturating_mul(JOB / u64::from(weight.max(1))));
        let others = self.flows.iter().filter(|(other, _)| **other != id).map(|(other, flow)| {
            // Of two that begin at the same time the flow with the lower number is first.
            let time = begins.saturating_add(u64::from(*other < id)).saturating_sub(flow.start);
            let earlier = time.div_ceil(JOB / u64::from(flow.weight));
            flow.urgent.len().min(usize::try_from(earlier).unwrap_or(usize::MAX))
        });
        before + others.sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Serves until `count` jobs have run, one after the other; how many of each flow.
    fn serve(fair: &mut Fair<u64>, count: usize) -> BTreeMap<u64, u64> {
        let mut served = BTreeMap::new();
        for _ in 0..count {
            *served.entry(fair.next().unwrap()).or_default() += 1;
            fair.done();
        }
        served
    }

    proptest! {
        #[test]
        fn flows_that_have_jobs_share_by_weight(weights in proptest::collection::vec(1..1000u32, 2..6), count in 1..300usize) {
            let mut fair = Fair::new(1);
            for (flow, weight) in (0u64..).zip(&weights) {
                (0..count).for_each(|_| fair.push(flow, *weight, flow, false));
            }
            let served = serve(&mut fair, count);
            // The bound of the paper: what two flows got, by weight, differs by no more than a job of each.
            let share = |flow: u64, weight: u32| *served.get(&flow).unwrap_or(&0) as f64 / f64::from(weight);
            for (a, one) in (0u64..).zip(&weights) {
                for (b, other) in (0u64..).zip(&weights) {
                    let apart = (share(a, *one) - share(b, *other)).abs();
                    prop_assert!(apart <= 1.0 / f64::from(*one) + 1.0 / f64::from(*other) + 1e-6, "{served:?} by {weights:?}");
                }
            }
        }

        #[test]
        fn no_job_starves(weights in proptest::collection::vec(1..100u32, 2..6)) {
            // One flow asks for one job; the others never stop asking.
            let mut fair = Fair::new(1);
            let others: u64 = weights.iter().skip(1).map(|weight| u64::from(*weight)).sum();
            for (flow, weight) in (0u64..).zip(&weights).skip(1) {
                (0..3).for_each(|_| fair.push(flow, *weight, flow, false));
            }
            serve(&mut fair, 2);
            fair.push(0, weights[0], 0, false);
            // While it waits for its own time, each other flow gets its share of that, and one job that had begun.
            let bound = others / u64::from(weights[0]) + 2 * weights.len() as u64;
            for turn in 0.. {
                prop_assert!(turn <= bound, "still not served after {turn} of {bound}");
                let served = fair.next().unwrap();
                fair.done();
                if served == 0 {
                    break;
                }
                let weight = weights[usize::try_from(served).unwrap()];
                fair.push(served, weight, served, false);
            }
        }

        #[test]
        fn the_place_of_an_urgent_job_is_known_before_it_is_pushed(
            weights in proptest::collection::vec(1..1000u32, 4),
            steps in proptest::collection::vec((0..4u64, any::<bool>(), any::<bool>()), 0..80),
            flow in 0..4u64,
        ) {
            const IT: u64 = u64::MAX;
            let weight = |flow: u64| weights[usize::try_from(flow).unwrap()];
            let mut fair = Fair::new(1);
            for (job, (flow, urgent, is_served)) in (0..).zip(steps) {
                fair.push(flow, weight(flow), job, urgent);
                if is_served {
                    fair.done();
                    fair.next();
                }
            }
            let nth = fair.flows.get(&flow).map_or(0, |flow| flow.urgent.len()) + 1;
            let ahead = fair.ahead(flow, weight(flow), nth);
            fair.push(flow, weight(flow), IT, true);
            let mut next = || { fair.done(); fair.next() };
            let before = std::iter::from_fn(&mut next).take_while(|job| *job != IT).count();
            prop_assert_eq!(before, ahead);
        }

        #[test]
        fn every_job_runs_once_and_never_more_than_the_capacity(
            steps in proptest::collection::vec((0..4u64, 1..1000u32, any::<bool>(), 0..4u8), 1..200),
            capacity in 1..5usize,
        ) {
            let (mut fair, mut pushed, mut ran, mut running) = (Fair::new(capacity), 0u64, Vec::new(), 0);
            for (flow, weight, urgent, what) in steps {
                match what {
                    0 => fair.hurry(flow, 2),
                    1 if running > 0 => {
                        fair.done();
                        running -= 1;
                    }
                    _ => {
                        fair.push(flow, weight, pushed, urgent);
                        pushed += 1;
                    }
                }
                while let Some(job) = fair.next() {
                    ran.push(job);
                    running += 1;
                }
                prop_assert!(running <= capacity);
                prop_assert!(running == capacity || fair.waiting() == 0, "capacity lies idle");
            }
            while let Some(job) = { fair.done(); fair.next() } {
                ran.push(job);
            }
            ran.sort_unstable();
            prop_assert_eq!(ran, (0..pushed).collect::<Vec<_>>());
            prop_assert!(fair.waiting() == 0);
        }
    }

    #[test]
    fn what_somebody_waits_for_comes_first() {
        let mut fair = Fair::new(1);
        for job in 0..4 {
            fair.push(1, 1000, job, false);
            fair.push(2, 1, 10 + job, false);
        }
        fair.push(3, 1, 20, true);
        assert_eq!(serve(&mut fair, 1).into_keys().next(), Some(20));
        // A claim waits for what flow 2 has asked for.
        fair.hurry(2, 2);
        assert_eq!(serve(&mut fair, 2).into_keys().collect::<Vec<_>>(), [10, 11]);
        assert_eq!(serve(&mut fair, 1).into_keys().next(), Some(0));
    }

    #[test]
    fn who_was_away_gains_nothing_by_it() {
        let mut fair = Fair::new(1);
        (0..100).for_each(|_| fair.push(1, 1, 1, false));
        serve(&mut fair, 50);
        (0..50).for_each(|_| fair.push(2, 1, 2, false));
        let served = serve(&mut fair, 20);
        assert!(served[&1].abs_diff(served[&2]) <= 1, "{served:?}");
    }
}
