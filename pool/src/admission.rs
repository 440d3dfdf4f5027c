//! What the node can afford. Memory is reserved here before a VM's process starts and given back after it has ended.

use std::{sync::Arc, time::Duration};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// What a VM costs beside its guest's memory: process, page tables, kernel structures. A paused one's PSS was 2.3 MiB on a busy machine
/// (docs/ARCHITECTURE.md, "What a paused VM costs"); more is kept, since that figure leaves the kernel's share out.
const OVERHEAD_MIB: u32 = 8;

/// How long pools may take to give up what they can spare.
const SPARING: Duration = Duration::from_secs(2);

/// The node's memory.
#[derive(Debug, Clone)]
pub(crate) struct Admission {
    free_mib: Arc<Semaphore>,
    total_mib: u32,
    released: watch::Sender<()>,
    short: watch::Sender<()>,
}

/// Memory promised to one VM, until dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    permit: Option<OwnedSemaphorePermit>,
    released: watch::Sender<()>,
}

/// The node has not that much left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{needed_mib} MiB of memory needed, {available_mib} of {total_mib} MiB available")]
pub(crate) struct NoMemory {
    pub(crate) needed_mib: u32,
    pub(crate) available_mib: u32,
    pub(crate) total_mib: u32,
}

impl Admission {
    pub(crate) fn new(total_bytes: u64) -> Self {
        let total_mib = u32::try_from(total_bytes >> 20).unwrap_or(u32::MAX);
        let free_mib = Arc::new(Semaphore::new(total_mib as usize));
        Self { free_mib, total_mib, released: watch::Sender::new(()), short: watch::Sender::new(()) }
    }

    /// Reserves what a VM with this much guest memory needs, or says at once that it is not there.
    pub(crate) fn reserve(&self, guest_mib: u32) -> Result<Reservation, NoMemory> {
        let needed_mib = guest_mib.saturating_add(OVERHEAD_MIB);
        match Arc::clone(&self.free_mib).try_acquire_many_owned(needed_mib) {
            Ok(permit) => Ok(Reservation { permit: Some(permit), released: self.released.clone() }),
            Err(_) => {
                self.short.send_replace(());
                Err(NoMemory { needed_mib, available_mib: self.available_mib(), total_mib: self.total_mib })
            }
        }
    }

    /// Reserves for a VM that lives already, however little there is: a node that is started again may have less than before.
    pub(crate) fn reserve_for_living(&self, guest_mib: u32) -> Reservation {
        self.reserve(guest_mib).unwrap_or_else(|short| {
            tracing::warn!(%short, "a VM that lives takes more memory than the node has left");
            let permit = Arc::clone(&self.free_mib).try_acquire_many_owned(short.available_mib).ok();
            Reservation { permit, released: self.released.clone() }
        })
    }

    /// Hears of every reservation that was refused: whoever holds what it can spare gives it back.
    pub(crate) fn shortages(&self) -> watch::Receiver<()> {
        self.short.subscribe()
    }

    /// As `reserve`, and waits a moment for what others can spare.
    pub(crate) async fn reserve_spared(&self, guest_mib: u32) -> Result<Reservation, NoMemory> {
        let mut releases = self.releases();
        let deadline = tokio::time::Instant::now() + SPARING;
        loop {
            match self.reserve(guest_mib) {
                Err(error) => match tokio::time::timeout_at(deadline, releases.changed()).await {
                    Ok(Ok(())) => {}
                    _ => return Err(error),
                },
                reserved => return reserved,
            }
        }
    }

    /// Hears of every release.
    pub(crate) fn releases(&self) -> watch::Receiver<()> {
        self.released.subscribe()
    }

    /// Waits until no VM holds memory any more, and lets no new one have any.
    pub(crate) async fn all_returned(&self) {
        if let Ok(everything) = self.free_mib.acquire_many(self.total_mib).await {
            everything.forget();
        }
    }

    pub(crate) fn available_mib(&self) -> u32 {
        u32::try_from(self.free_mib.available_permits()).unwrap_or(u32::MAX)
    }

    /// A quarter of the memory is not promised: VMs that nobody has asked for yet take no more than the rest.
    pub(crate) fn is_roomy(&self) -> bool {
        self.available_mib() >= self.total_mib / 4
    }

    pub(crate) const fn total_mib(&self) -> u32 {
        self.total_mib
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        drop(self.permit.take());
        self.released.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_promised_once_and_its_return_is_heard_of() {
        let node = Admission::new(600 << 20);
        let mut releases = node.releases();
        let first = node.reserve(256).unwrap();
        let second = node.reserve(256).unwrap();
        let refusal = node.reserve(256).unwrap_err();
        assert_eq!((refusal.needed_mib, refusal.available_mib, refusal.total_mib), (264, 72, 600));
        assert!(!releases.has_changed().unwrap());
        drop(first);
        assert!(releases.has_changed().unwrap());
        releases.mark_unchanged();
        drop(node.reserve(256).unwrap());
        drop(second);
        assert_eq!(node.available_mib(), 600);
    }

    #[test]
    fn a_vm_that_lives_has_its_memory_even_if_the_node_has_less() {
        let node = Admission::new(100 << 20);
        let living = node.reserve_for_living(256);
        assert_eq!(node.available_mib(), 0);
        let another = node.reserve_for_living(256);
        drop((living, another));
        assert_eq!(node.available_mib(), 100);
    }
}
