//! How many claims there may be at once.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

/// No limit.
const UNLIMITED: u32 = u32::MAX;

/// Places for claims.
#[derive(Debug, Clone)]
pub(crate) struct Places(Arc<Numbers>);

#[derive(Debug)]
struct Numbers {
    taken: AtomicU32,
    limit: AtomicU32,
}

/// One of them, until dropped.
#[derive(Debug)]
pub(crate) struct Place(Arc<Numbers>);

impl Places {
    /// So many, or as many as are asked for.
    pub(crate) fn new(limit: Option<u32>) -> Self {
        Self(Arc::new(Numbers { taken: AtomicU32::new(0), limit: AtomicU32::new(limit.unwrap_or(UNLIMITED)) }))
    }

    /// So many from now on. Those that were given out stay.
    pub(crate) fn limit_to(&self, limit: Option<u32>) {
        self.0.limit.store(limit.unwrap_or(UNLIMITED), Ordering::Relaxed);
    }

    /// Takes one.
    ///
    /// # Errors
    /// The limit, if all are taken.
    pub(crate) fn take(&self) -> Result<Place, u32> {
        let limit = self.0.limit.load(Ordering::Relaxed);
        let one_more = |taken: u32| taken.checked_add(1).filter(|taken| *taken <= limit);
        match self.0.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more) {
            Ok(_) => Ok(Place(Arc::clone(&self.0))),
            Err(_) => Err(limit),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
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
        assert_eq!(places.take().unwrap_err(), 2);
        places.limit_to(None);
        let third = places.take().unwrap();
        places.limit_to(Some(1));
        drop((first, second));
        assert_eq!(places.take().unwrap_err(), 1, "the third is still there");
        drop(third);
        assert!(places.take().is_ok());
    }
}
