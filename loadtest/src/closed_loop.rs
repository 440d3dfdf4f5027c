//! A fixed number of clients, each of which asks again once it has its answer.
//!
//! Right for throughput. Wrong for latency under a given load: a slow server is asked less often here, which hides its worst times.

use std::time::{Duration, Instant};

use futures_util::future::join_all;

/// One call, and when it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished<T> {
    /// Since the loop's start.
    pub at: Duration,
    /// From the call to its end.
    pub took: Duration,
    /// What the call returned.
    pub value: T,
}

/// Has each of `clients` call again and again until `length` is over, and returns the calls in the order of their ends. Calls under way then
/// are waited for, so that the server is idle again, and are among them; so there is at least one call of each client.
pub async fn closed_loop<C, T>(clients: Vec<C>, length: Duration, call: impl AsyncFn(&mut C) -> T) -> Vec<Finished<T>> {
    let begun = Instant::now();
    let call = &call;
    let each = clients.into_iter().map(|mut client| async move {
        let mut finished = Vec::new();
        loop {
            let sent = begun.elapsed();
            let value = call(&mut client).await;
            let at = begun.elapsed();
            finished.push(Finished { at, took: at - sent, value });
            if at >= length {
                return finished;
            }
        }
    });
    let mut all: Vec<_> = join_all(each).await.into_iter().flatten().collect();
    all.sort_by_key(|finished| finished.at);
    all
}

/// How many of `ends` fall into each of `seconds` windows of one second, the first of which begins at `from`.
pub fn per_second(ends: impl IntoIterator<Item = Duration>, from: Duration, seconds: usize) -> Vec<u64> {
    let mut windows = vec![0; seconds];
    for end in ends {
        let window = end.checked_sub(from).and_then(|since| usize::try_from(since.as_secs()).ok());
        if let Some(count) = window.and_then(|window| windows.get_mut(window)) {
            *count += 1;
        }
    }
    windows
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test]
    async fn each_client_keeps_its_state_and_has_one_call_under_way() {
        let (under_way, most) = (Cell::new(0), Cell::new(0));
        let finished = closed_loop(vec![(0, 0), (1, 0), (2, 0)], Duration::from_millis(20), async |client| {
            under_way.set(under_way.get() + 1);
            most.set(most.get().max(under_way.get()));
            tokio::task::yield_now().await;
            under_way.set(under_way.get() - 1);
            client.1 += 1;
            *client
        })
        .await;
        assert_eq!(most.get(), 3);
        assert!(finished.is_sorted_by_key(|finished| finished.at));
        for client in 0..3 {
            let calls: Vec<_> = finished.iter().map(|f| f.value).filter(|value| value.0 == client).collect();
            assert_eq!(calls.last(), Some(&(client, calls.len())), "each call is there once");
        }
    }

    #[tokio::test]
    async fn no_time_is_still_one_call() {
        let finished = closed_loop(vec![()], Duration::ZERO, async |()| 7).await;
        assert_eq!(finished.iter().map(|f| f.value).collect::<Vec<_>>(), [7]);
        assert!(closed_loop(Vec::<()>::new(), Duration::from_secs(1), async |()| 7).await.is_empty());
    }

    #[test]
    fn windows_count_what_ends_in_them() {
        let ends = [0, 999, 1000, 1500, 3999, 4000, 9000].map(Duration::from_millis);
        assert_eq!(per_second(ends, Duration::ZERO, 4), [2, 2, 0, 1]);
        assert_eq!(per_second(ends, Duration::from_secs(1), 3), [2, 0, 1]);
        assert!(per_second(ends, Duration::ZERO, 0).is_empty());
    }
}
