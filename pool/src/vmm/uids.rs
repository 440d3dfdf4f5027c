//! One uid per VM: no two processes that live have the same.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Uids of a node; more than it has memory for VMs.
const COUNT: u32 = 4096;

/// The uids that no VM has. The one that was given back longest ago is the next, so that what little may still bear a uid has the
/// most time to go.
#[derive(Debug, Clone)]
pub(crate) struct Uids {
    free: Arc<Mutex<VecDeque<u32>>>,
    all: Range<u32>,
}

/// A uid, until dropped. To be kept until the process has been reaped.
#[derive(Debug)]
pub(crate) struct Lease {
    uid: u32,
    from: Uids,
}

impl Uids {
    /// `base` and those that follow.
    pub(crate) fn new(base: u32) -> Self {
        let all = base..base.saturating_add(COUNT);
        Self { free: Arc::new(Mutex::new(all.clone().collect())), all }
    }

    /// One that nobody has; none if all are taken.
    pub(crate) fn take(&self) -> Option<Lease> {
        let uid = self.lock().pop_front()?;
        Some(Lease { uid, from: self.clone() })
    }

    /// A certain one, which a VM has that another node has started: perhaps one of its own range. None if a VM of this node has it.
    pub(crate) fn take_this(&self, uid: u32) -> Option<Lease> {
        let mut free = self.lock();
        match free.iter().position(|one| *one == uid) {
            Some(at) => drop(free.remove(at)),
            None if self.all.contains(&uid) => return None,
            None => {}
        }
        Some(Lease { uid, from: self.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<u32>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
impl Uids {
    pub(crate) fn free(&self) -> usize {
        self.lock().len()
    }
}

impl Lease {
    pub(crate) fn uid(&self) -> u32 {
        self.uid
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.from.all.contains(&self.uid) {
            self.from.lock().push_back(self.uid);
        }
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

    #[test]
    fn a_uid_that_a_vm_has_already_is_nobody_else_s() {
        let uids = Uids::new(7000);
        let found = uids.take_this(7001).unwrap();
        assert!(uids.take_this(7001).is_none());
        let others: Vec<_> = std::iter::from_fn(|| uids.take()).collect();
        assert!(others.len() == 4095 && others.iter().all(|other| other.uid() != 7001));
        drop(found);
        assert_eq!(uids.take().unwrap().uid(), 7001);
        // A node's that had other uids: not one of ours to give.
        let foreign = uids.take_this(99_000).unwrap();
        assert_eq!(foreign.uid(), 99_000);
        drop(foreign);
        assert_eq!(uids.free(), 1);
    }
}
