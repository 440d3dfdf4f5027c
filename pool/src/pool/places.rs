//! How many claims there may be at once.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
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
    pace: Mutex<Pace>,
}

impl Numbers {
    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of them, until dropped.
#[derive(Debug)]
pub(crate) struct Place(Arc<Numbers>, Instant);

/// All of them are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AllTaken {
    /// So many there are.
    pub(crate) limit: u32,
    /// When one will be free: the mean time for which one is taken, of the last ten or so, by their number.
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

    /// Takes one.
    ///
    /// # Errors
    /// All are taken.
    pub(crate) fn take(&self) -> Result<Place, AllTaken> {
        let limit = self.0.limit.load(Ordering::Relaxed);
        let one_more = |taken: u32| taken.checked_add(1).filter(|taken| *taken <= limit);
        match self.0.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more) {
            Ok(_) => Ok(Place(Arc::clone(&self.0), Instant::now())),
            Err(_) => {
                let per_second = self.0.pace().per_second(limit as usize);
                Err(AllTaken { limit, retry_after: retry_after(1, per_second) })
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.pace().ended(self.1.elapsed());
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
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
    async fn who_finds_none_hears_when_one_is_free_by_how_long_they_are_taken() {
        let places = Places::new(Some(2));
        let seconds = |places: &Places| places.take().unwrap_err().retry_after.as_secs();
        let both = [places.take().unwrap(), places.take().unwrap()];
        assert_eq!(seconds(&places), 1, "nothing was measured yet");
        tokio::time::advance(Duration::from_secs(21)).await;
        drop(both);
        let _both = [places.take().unwrap(), places.take().unwrap()];
        assert_eq!(seconds(&places), 11, "one of two, each taken for 21 s");
        places.limit_to(Some(1));
        assert_eq!(seconds(&places), 21);
    }
}
