//! Limits, and settings that change.

use super::*;

#[tokio::test]
async fn memory_of_its_own_bounds_it() {
    // Guests of 64 MiB: three of them.
    let bench = bench("min=5\nmax=8\nmax_memory='200MiB'", 10_000, Fakes::default());
    let status = bench.until(|status| status.ready == 3 && status.restoring == 0).await;
    assert_eq!((status.target, status.bound_by), (3, Some(BoundBy::MaxMemory)));
    let claims = futures_util::future::join_all((0..3).map(|_| bench.pool.claim(BUDGET))).await;
    match bench.pool.claim(Duration::from_millis(50)).await {
        Err(ClaimError::Exhausted { bound, .. }) => assert!(bound.contains("pool.max_memory"), "{bound}"),
        other => panic!("{other:?}"),
    }
    drop(claims);
    bench.until(|status| status.ready == 3).await;
}

#[tokio::test]
async fn a_buffer_stands_ready_while_it_is_in_use() {
    let bench = bench("min=0\nbuffer=2\nmax=8", 1000, Fakes::default());
    assert_eq!(bench.pool.status().await.unwrap().target, 0);
    let claim = bench.pool.claim(BUDGET).await.unwrap();
    bench.until(|status| (status.target, status.ready) == (2, 2)).await;
    drop(claim);
    bench.until(|status| status.target == 0).await;
}

#[tokio::test(start_paused = true)]
async fn one_that_is_not_used_is_scaled_to_zero_and_comes_back_with_the_next_claim() {
    let bench = bench(
        "min=2\nhot=1\nscale_to_zero_after='60s'",
        1000,
        Fakes { usual: Some(Agent::Polite), ..Fakes::default() },
    );
    // Time passes by itself while nothing else happens.
    tokio::time::sleep(Duration::from_secs(50)).await;
    let status = bench.until(|status| (status.ready, status.hot) == (1, 1)).await;
    // By the clock on the wall, which goes on while this one stands still.
    let until = status.next_change_at.expect("it is scaled to zero by and by").since(stasis_pool_api::Timestamp::now());
    assert!(until <= Duration::from_secs(10), "{until:?}");
    tokio::time::sleep(Duration::from_secs(20)).await;
    let status = bench.until(|status| status.vms() == 0).await;
    assert_eq!((status.target, status.bound_by, status.next_change_at), (0, Some(BoundBy::Idle), None));
    drop(bench.pool.claim(BUDGET).await.unwrap());
    bench.until(|status| (status.ready + status.hot, status.bound_by) == (2, None)).await;
}

#[tokio::test(start_paused = true)]
async fn one_that_a_claim_began_ends_and_what_comes_then_is_told_so() {
    let bench = bench_of("min=2", 1000, Fakes::default(), true);
    bench.until(|status| status.ready == 2).await;
    let claim = bench.pool.claim(BUDGET).await.unwrap();
    tokio::time::sleep(PoolSpec::TENANT_IDLE * 2).await;
    assert!(!bench.pool.has_ended(), "somebody has one of its VMs");
    drop(claim);
    tokio::time::sleep(PoolSpec::TENANT_IDLE - Duration::from_secs(1)).await;
    assert!(!bench.pool.has_ended());
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(bench.pool.has_ended());
    assert!(matches!(bench.pool.claim(BUDGET).await, Err(ClaimError::UnknownTemplate(_))));
    tokio::time::timeout(BUDGET, bench.admission.all_returned()).await.expect("memory is given back");
}

#[tokio::test]
async fn it_follows_what_is_set() {
    let bench = bench("min=1\nmax=2", 1000, Fakes::default());
    bench.until(|status| status.ready == 1).await;
    let set = |min, max| PoolSpec { min, max, ..PoolSpec::default() };
    bench.pool.set(set(5, 6));
    let status = bench.until(|status| status.ready == 5).await;
    assert_eq!((status.target, status.settings.max), (5, 6));
    bench.pool.set(set(0, 1));
    bench.until(|status| status.vms() == 0).await;
}

#[tokio::test(start_paused = true)]
async fn who_is_sent_away_is_told_when_it_would_be_its_turn() {
    let bench = bench("min=0\nmax=1", 1000, Fakes::default());
    let held = bench.pool.claim(BUDGET).await.unwrap();
    // One VM in 30 seconds, since each of its claims lasts so long.
    let pool = bench.pool.clone();
    let next = tokio::spawn(async move { pool.claim(Duration::from_secs(60)).await });
    bench.until(|status| status.waiting == 1).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    drop(held);
    let held = next.await.unwrap().unwrap();
    let waiting: Vec<_> = (0..2)
        .map(|_| {
            let pool = bench.pool.clone();
            tokio::spawn(async move { pool.claim(Duration::from_secs(600)).await })
        })
        .collect();
    bench.until(|status| status.waiting == 2).await;
    let rate = bench.pool.status().await.unwrap().refill_per_s.expect("two VMs were seen to become ready");
    match bench.pool.claim(Duration::from_millis(10)).await {
        Err(ClaimError::Exhausted { retry_after, .. }) => {
            let third = (3.0 / rate).ceil();
            assert_eq!(retry_after, Duration::from_secs_f64(third), "third at {rate} per second");
            assert!(retry_after > Duration::from_secs(1));
        }
        other => panic!("{other:?}"),
    }
    drop(held);
    for one in waiting {
        drop(one.await.unwrap().unwrap());
    }
}
