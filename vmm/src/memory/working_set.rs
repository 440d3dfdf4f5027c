//! The pages that the guest writes in every life, learnt from the lives before.
//!
//! A page that the guest touches first costs its host some 25 us; made private and writable ahead, one (`host-kvm.md`). Pages made so are
//! private whether the guest then writes them or not, so every now and then a life goes without, and shows what is really written.

use std::{cmp::Ordering, ops::Range};

/// Lives until the set is learnt again.
const RELEARN: u64 = 16;

/// What has been learnt.
#[derive(Debug, Default)]
pub(crate) struct WorkingSet {
    lives: u64,
    /// What the last life without help has written.
    written: Vec<Range<u64>>,
    /// What the last two such lives have both written.
    common: Vec<Range<u64>>,
}

impl WorkingSet {
    /// What to make writable ahead in the life that begins now.
    pub(crate) fn ahead(&self) -> &[Range<u64>] {
        if self.is_learning() { &[] } else { &self.common }
    }

    /// The present life is over; these pages were private at its end.
    pub(crate) fn end_of_life(&mut self, private: &[Range<u64>]) {
        if self.is_learning() {
            self.common = common(&self.written, private);
            self.written = private.to_vec();
        }
        self.lives += 1;
    }

    fn is_learning(&self) -> bool {
        self.lives < 2 || self.lives.is_multiple_of(RELEARN)
    }
}

/// What two ascending lists of ranges have in common.
fn common(a: &[Range<u64>], b: &[Range<u64>]) -> Vec<Range<u64>> {
    let (mut i, mut j, mut found) = (0, 0, Vec::new());
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        let overlap = x.start.max(y.start)..x.end.min(y.end);
        if !overlap.is_empty() {
            found.push(overlap);
        }
        match x.end.cmp(&y.end) {
            Ordering::Less => i += 1,
            Ordering::Greater => j += 1,
            Ordering::Equal => (i, j) = (i + 1, j + 1),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn pages(ranges: &[Range<u64>]) -> BTreeSet<u64> {
        ranges.iter().flat_map(Clone::clone).collect()
    }

    fn ranges(pages: &BTreeSet<u64>) -> Vec<Range<u64>> {
        let mut found: Vec<Range<u64>> = Vec::new();
        for page in pages {
            match found.last_mut() {
                Some(last) if last.end == *page => last.end += 1,
                _ => found.push(*page..page + 1),
            }
        }
        found
    }

    proptest! {
        #[test]
        fn the_common_part_is_that_of_sets(a: BTreeSet<u8>, b: BTreeSet<u8>) {
            let [a, b] = [a, b].map(|set| set.into_iter().map(u64::from).collect::<BTreeSet<_>>());
            let both: BTreeSet<_> = a.intersection(&b).copied().collect();
            prop_assert_eq!(pages(&common(&ranges(&a), &ranges(&b))), both);
        }
    }

    #[test]
    fn what_is_no_longer_written_is_forgotten() {
        let range = |pages: Range<u64>| std::iter::once(pages).collect::<Vec<_>>();
        let mut set = WorkingSet::default();
        for _ in 0..2 {
            assert_eq!(set.ahead(), []);
            set.end_of_life(&range(10..20));
        }
        assert_eq!(set.ahead(), range(10..20));
        for _ in 2..2 * RELEARN {
            // The guest writes something else now; what was made private ahead is private too.
            let ahead = set.ahead().first().cloned();
            set.end_of_life(&ahead.into_iter().chain(range(30..40)).collect::<Vec<_>>());
        }
        set.end_of_life(&range(30..40));
        assert_eq!(set.ahead(), range(30..40));
    }
}
