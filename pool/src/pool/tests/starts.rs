//! What becomes of claims that need a start, while the node has others to begin.

use stasis_pool_api::{NoCapacity, Resource};

use super::*;

/// Four restores at a time, which take so long. Time passes by itself only while nothing else can happen.
async fn slow(max: u32, takes: Duration) -> Bench {
    let bench = bench(&format!("min=0\nmax={max}"), 100_000, Fakes { takes, ..Fakes::default() });
    // One is measured, and gone.
    let first = bench.pool.claim(takes * 2).await.unwrap();
    first.lease.report_failure("r", "measured");
    drop(first);
    bench.until(|status| status.vms() == 0).await;
    bench
}

/// Others have asked for more than can be done in minutes, and never end what they begin.
fn others(bench: &Bench) -> Vec<impl Future<Output = Turn>> {
    (0..1_000).map(|_| bench.shared.restores.take(&Flow::new(100), Urgency::Claim)).collect()
}

fn late(claimed: &Result<Claim, ClaimError>) -> Option<(NoCapacity, Duration)> {
    match claimed {
        Err(ClaimError::NoCapacity { full, retry_after, .. }) => Some((*full, *retry_after)),
        Err(other) => panic!("{other:?}"),
        Ok(_) => None,
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_start_would_come_too_late_is_refused_at_once_and_all_others_are_served() {
    let bench = slow(100, Duration::from_secs(1)).await;
    let begun = tokio::time::Instant::now();
    // In three seconds, and what the repairs take, four at a time can do twelve.
    let claims = (0..20).map(|_| async {
        let claimed = bench.pool.claim(Duration::from_millis(3200)).await;
        (claimed, begun.elapsed())
    });
    let claims = futures_util::future::join_all(claims).await;
    let refused: Vec<_> = claims.iter().filter_map(|(claimed, when)| Some((late(claimed)?, *when))).collect();
    assert_eq!(claims.len() - refused.len(), 12);
    for ((full, retry_after), when) in refused {
        assert_eq!(full, NoCapacity { resource: Resource::Starts, needed: 9, available: 8, limit: 4 });
        assert_eq!(retry_after, Duration::from_secs(3), "nine at four a second");
        assert_eq!(when, Duration::ZERO, "it waited");
    }
    let turns = bench.shared.restores.state();
    assert_eq!((turns.limit, turns.under_way, turns.queued), (4, 0, 0));
    assert!(turns.per_s.is_some_and(|rate| (rate - 4.0).abs() < 0.1), "{turns:?}");
}

#[tokio::test(start_paused = true)]
async fn what_is_ready_or_on_its_way_is_not_refused_for_the_starts_of_others() {
    let bench = slow(100, Duration::from_secs(1)).await;
    bench.pool.set(PoolSpec { min: 2, max: 100, ..PoolSpec::default() });
    bench.until(|status| status.restoring == 2).await;
    let _others = others(&bench);
    let limit = Duration::from_secs(60);
    let claims = futures_util::future::join_all((0..3).map(|_| bench.pool.claim(limit))).await;
    assert_eq!(claims.iter().filter_map(late).count(), 1, "two were on their way: {claims:?}");
    // One that is used comes back to the next.
    drop(claims);
    let ready = bench.pool.claim(limit).await;
    assert!(ready.is_ok(), "{ready:?}");
}

#[tokio::test(start_paused = true)]
async fn where_no_more_vms_are_allowed_a_claim_waits_for_what_is_used() {
    // At this pool's own rate, too, another VM would come too late.
    let long = BUDGET * 5;
    let bench = slow(1, long).await;
    let first = bench.pool.claim(long * 2).await.unwrap();
    let _others = others(&bench);
    let pool = bench.pool.clone();
    let second = tokio::spawn(async move { pool.claim(BUDGET).await });
    bench.until(|status| status.waiting == 1).await;
    drop(first);
    assert!(second.await.unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn what_is_brought_back_or_forked_is_refused_like_a_claim_whose_start_would_come_too_late() {
    let bench = slow(100, Duration::from_secs(1)).await;
    let _others: Vec<_> = (0..16).map(|_| bench.shared.restores.take(&Flow::new(100), Urgency::Claim)).collect();
    // Four run and twelve wait: at four a second the next begins after a little more than three seconds, and takes one.
    let refused = bench.shared.can_start(1, Duration::from_secs(4)).unwrap_err();
    assert_eq!((refused.what.resource, refused.what.needed, refused.what.limit), (Resource::Starts, 13, 4));
    assert_eq!(refused.retry_after, Duration::from_secs(4), "thirteen at four a second");
    bench.shared.can_start(1, Duration::from_secs(5)).unwrap();
    let refused = bench.shared.can_start(100, Duration::from_secs(5)).unwrap_err();
    assert_eq!(refused.what.needed, 112, "all of them, or none");
}

#[tokio::test(start_paused = true)]
async fn one_that_is_brought_back_waits_for_its_turns_no_longer_than_it_may() {
    let bench = bench("min=0\nmax=1", 100_000, Fakes::default());
    let now = tokio::time::Instant::now;
    for turns in [bench.shared.restores.clone(), bench.shared.wakes.clone()] {
        // Nothing was measured, so nobody could tell before.
        let taken: Vec<_> = (0..turns.state().limit).map(|_| turns.take(&Flow::new(100), Urgency::Claim)).collect();
        let taken = futures_util::future::join_all(taken).await;
        bench.shared.can_start(1, BUDGET).unwrap();
        let until = now() + BUDGET;
        let (start, wake) = tokio::join!(bench.shared.turn_to_start(until), bench.shared.turn_to_wake(until));
        let refused: Vec<_> = [start.err(), wake.err()].into_iter().flatten().collect();
        assert_eq!(refused.len(), 1, "the other's turns are free");
        assert_eq!((refused[0].what.resource, refused[0].what.available), (Resource::Starts, 0));
        assert!(now() <= until + Duration::from_millis(1), "it waited on");
        drop(taken);
    }
}

#[tokio::test(start_paused = true)]
async fn the_offered_load_is_what_claims_keep_and_goes_when_they_do() {
    let bench = bench("min=0\nmax=4", 100_000, Fakes::default());
    let claims = futures_util::future::join_all((0..3).map(|_| bench.pool.claim(BUDGET))).await;
    assert!(claims.iter().all(Result::is_ok));
    let long = crate::admission::LATELY * 20;
    tokio::time::sleep(long).await;
    let near = |load: f64, vms: f64| (load - vms).abs() < 0.02;
    assert!(near(bench.pool.status().await.unwrap().offered_load, 3.0));
    drop(claims);
    let soon = bench.until(|status| status.claimed + status.rewinding == 0).await.offered_load;
    assert!(soon > 2.5, "{soon}");
    // The series too, though nothing happens.
    tokio::time::sleep(long).await;
    assert!(near(bench.pool.status().await.unwrap().offered_load, 0.0));
}
