//! How many claims there may be at once, and when the next one may come.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use super::rate::{Pace, retry_after};

/// No limit.
const UNLIMITED: u32 = u32::MAX;

/// Places for claims.
#[derive(Debug, Clone)]
pub(crate) struct Places(Arc<Numbers>);

#[derive(Debug)]
struct Numbers {
    taken: AtomicU32,
    limit: AtomicU32,
    /// How long places are held.
    pace: Mutex<Pace>,
}

/// One of them, until dropped, and since when; whose was not used is not measured.
#[derive(Debug)]
pub(crate) struct Place {
    of: Arc<Numbers>,
    since: Option<Instant>,
}

/// As many places are taken as there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AllTaken {
    pub(crate) limit: u32,
    pub(crate) retry_after: Duration,
}

impl Places {
    /// So many, or as many as are asked for.
    pub(crate) fn new(limit: Option<u32>) -> Self {
        let limit = AtomicU32::new(limit.unwrap_or(UNLIMITED));
        Self(Arc::new(Numbers { taken: AtomicU32::new(0), limit, pace: Mutex::default() }))
    }

    /// So many from now on. Those that were given out stay.
    pub(crate) fn limit_to(&self, limit: Option<u32>) {
        self.0.limit.store(limit.unwrap_or(UNLIMITED), Ordering::Relaxed);
    }

    /// Takes one. If all are taken, one may be had when as many are given back as are too many for that: at the rate of those that are taken
    /// by the mean time for which the last ten or so were held, at least a second, which is also said when none was given back yet.
    pub(crate) fn take(&self) -> Result<Place, AllTaken> {
        let limit = self.0.limit.load(Ordering::Relaxed);
        let one_more = |taken: u32| taken.checked_add(1).filter(|taken| *taken <= limit);
        match self.0.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more) {
            Ok(_) => Ok(Place { of: Arc::clone(&self.0), since: Some(Instant::now()) }),
            Err(taken) => {
                let rate = self.0.pace().per_second(usize::try_from(taken).unwrap_or(usize::MAX));
                let too_many = taken.saturating_sub(limit).saturating_add(1);
                Err(AllTaken { limit, retry_after: retry_after(too_many, rate) })
            }
        }
    }
}

impl Numbers {
    fn pace(&self) -> std::sync::MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Its claim was refused for another reason, at once.
    pub(crate) fn give_back_unused(mut self) {
        self.since = None;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(since) = self.since {
            self.of.pace().ended(since.elapsed());
        }
        self.of.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_as_the_limit_says_and_a_new_limit_holds_for_the_next() {
        let places = Places::new(Some(2));
        let (first, second) = (places.take().unwrap(), places.take().unwrap());
        assert_eq!(places.take().unwrap_err().limit, 2);
        places.limit_to(None);
        let third = places.take().unwrap();
        places.limit_to(Some(1));
        drop((first, second));
        assert_eq!(places.take().unwrap_err().limit, 1, "the third is still there");
        drop(third);
        assert!(places.take().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn one_may_be_had_when_those_who_have_them_are_through() {
        let places = Places::new(Some(2));
        let when = || places.take().unwrap_err().retry_after;
        let taken = [places.take().unwrap(), places.take().unwrap()];
        assert_eq!(when(), Duration::from_secs(1), "nothing was measured");
        tokio::time::advance(Duration::from_secs(6)).await;
        drop(taken);
        places.take().unwrap().give_back_unused();
        let _taken = [places.take().unwrap(), places.take().unwrap()];
        assert_eq!(when(), Duration::from_secs(3), "two at a time, of six seconds each");
        places.limit_to(Some(1));
        assert_eq!(when(), Duration::from_secs(6), "both must be through");
    }
}
