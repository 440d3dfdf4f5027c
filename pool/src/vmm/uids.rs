//! One uid per VM: no two processes that live have the same.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

/// Uids of a node; more than it has memory for VMs.
const COUNT: u32 = 4096;

/// The uids that no VM has. The one that was given back longest ago is the next, so that what little may still bear a uid has the
/// most time to go.
#[derive(Debug, Clone)]
pub(crate) struct Uids(Arc<Mutex<VecDeque<u32>>>);

/// A uid, until dropped. To be kept until the process has been reaped.
#[derive(Debug)]
pub(crate) struct Lease {
    uid: u32,
    from: Uids,
}

impl Uids {
    /// `base` and those that follow.
    pub(crate) fn new(base: u32) -> Self {
        Self(Arc::new(Mutex::new((base..base.saturating_add(COUNT)).collect())))
    }

    /// One that nobody has; none if all are taken.
    pub(crate) fn take(&self) -> Option<Lease> {
        let uid = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front()?;
        Some(Lease { uid, from: self.clone() })
    }
}

#[cfg(test)]
impl Uids {
    pub(crate) fn free(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

impl Lease {
    pub(crate) fn uid(&self) -> u32 {
        self.uid
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.from.0.lock().unwrap_or_else(PoisonError::into_inner).push_back(self.uid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_shares_a_uid_and_a_returned_one_comes_last() {
        let uids = Uids::new(7000);
        let first = uids.take().unwrap();
        let rest: Vec<_> = std::iter::from_fn(|| uids.take()).collect();
        let mut all: Vec<_> = rest.iter().chain([&first]).map(Lease::uid).collect();
        all.sort_unstable();
        assert!(all.iter().copied().eq(7000..7000 + COUNT));
        assert!(uids.take().is_none());
        drop(first);
        assert_eq!(uids.take().unwrap().uid(), 7000);
        drop(rest);
        assert_eq!(uids.take().unwrap().uid(), 7000, "it was there before the rest");
        assert_eq!(uids.take().unwrap().uid(), 7001);
    }
}
