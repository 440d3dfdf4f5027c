//! Which pages are in the balloon.

use std::ops::Range;

/// A bit per page of guest memory.
pub(super) struct Pages(Vec<u64>);

impl Pages {
    /// None of `count` pages.
    pub(super) fn none(count: u64) -> Self {
        Self(vec![0; usize::try_from(count.div_ceil(64)).unwrap_or_default()])
    }

    /// Puts a page in or takes it out.
    pub(super) fn set(&mut self, page: u64, is_in: bool) {
        let Some(word) = usize::try_from(page / 64).ok().and_then(|index| self.0.get_mut(index)) else { return };
        if is_in { *word |= 1 << (page % 64) } else { *word &= !(1 << (page % 64)) }
    }

    /// Whether all of these pages are in.
    pub(super) fn all(&self, pages: Range<u64>) -> bool {
        pages.into_iter().all(|page| {
            let word = usize::try_from(page / 64).ok().and_then(|index| self.0.get(index));
            word.is_some_and(|word| word & 1 << (page % 64) != 0)
        })
    }

    /// Takes all out.
    pub(super) fn clear(&mut self) {
        self.0.fill(0);
    }
}
