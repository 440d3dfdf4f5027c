//! The ranges of a private mapping that are anonymous memory instead.

use std::ops::Range;

/// Ranges of guest addresses, in order; no two touch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Holes(Vec<Range<u64>>);

impl Holes {
    /// The ranges, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Range<u64>> {
        self.0.iter()
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The last one.
    pub(super) fn last(&self) -> Option<Range<u64>> {
        self.0.last().cloned()
    }

    /// Forgets the last one.
    pub(super) fn pop(&mut self) {
        self.0.pop();
    }

    /// Whether a range would grow a hole rather than make another one.
    pub(super) fn touches(&self, range: &Range<u64>) -> bool {
        !self.touching(range).is_empty()
    }

    /// Adds a range, and joins it with those that it touches.
    pub(super) fn insert(&mut self, range: Range<u64>) {
        let touching = self.touching(&range);
        let joined = self.0[touching.clone()].iter().fold(range, |a, b| a.start.min(b.start)..a.end.max(b.end));
        self.0.splice(touching, [joined]);
    }

    /// The pieces of a range, each with whether it is a hole.
    pub(super) fn split(&self, range: &Range<u64>) -> Vec<(Range<u64>, bool)> {
        let mut pieces = Vec::new();
        let mut at = range.start;
        for hole in &self.0[self.touching(range)] {
            let hole = hole.start.max(range.start)..hole.end.min(range.end);
            pieces.extend([(at..hole.start, false), (hole.clone(), true)]);
            at = hole.end;
        }
        pieces.push((at..range.end, false));
        pieces.retain(|(piece, _)| !piece.is_empty());
        pieces
    }

    /// The positions of the holes that overlap a range or lie right beside it.
    fn touching(&self, range: &Range<u64>) -> Range<usize> {
        let first = self.0.partition_point(|hole| hole.end < range.start);
        let end = self.0.partition_point(|hole| hole.start <= range.end);
        first..end.max(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a set of single addresses.
        #[test]
        fn holes_are_a_set(ranges in proptest::collection::vec((0u64..60, 1u64..12), 0..24), (start, length) in (0u64..60, 1u64..12)) {
            let mut holes = Holes::default();
            let mut model = std::collections::BTreeSet::new();
            for (start, length) in ranges {
                holes.insert(start..start + length);
                model.extend(start..start + length);
            }
            prop_assert!(holes.iter().cloned().flatten().eq(model.iter().copied()));
            prop_assert!(holes.0.windows(2).all(|pair| pair[0].end < pair[1].start));
            let range = start..start + length;
            let pieces = holes.split(&range);
            prop_assert!(pieces.iter().flat_map(|(piece, _)| piece.clone()).eq(range.clone()));
            prop_assert!(pieces.iter().all(|(piece, is_hole)| piece.clone().all(|at| model.contains(&at) == *is_hole)));
            let near = (start.saturating_sub(1)..start + length + 1).any(|at| model.contains(&at));
            prop_assert_eq!(holes.touches(&range), near);
        }
    }
}
