//! What becomes of claims where the node has no room, and of VMs that were granted and not used.

use super::*;
use crate::config::Cores;

fn refusal(claimed: Result<Claim, ClaimError>) -> stasis_pool_api::NoCapacity {
    match claimed {
        Err(ClaimError::NoCapacity { full, .. }) => full,
        other => panic!("{other:?}"),
    }
}

impl Bench {
    /// A claim that goes on beside the test.
    fn claiming(&self) -> tokio::task::JoinHandle<Result<Claim, ClaimError>> {
        let pool = self.pool.clone();
        tokio::spawn(async move { pool.claim(BUDGET).await })
    }

    fn restored(&self) -> u32 {
        self.fakes.made.load(Ordering::SeqCst)
    }
}

async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(BUDGET, work).await.expect("it hangs")
}

#[tokio::test(start_paused = true)]
async fn a_claim_without_memory_waits_only_for_what_is_on_its_way_back_or_for_its_own_pool() {
    let bench = bench("min=0\nmax=8", 100, Fakes::default());
    let other = bench.admission.reserve(64).unwrap();
    let begun = tokio::time::Instant::now();
    let full = refusal(bench.pool.claim(BUDGET).await);
    assert_eq!((full.needed, full.available, full.limit), (72 << 20, 28 << 20, 100 << 20));
    assert_eq!((begun.elapsed(), bench.restored()), (Duration::ZERO, 0), "it waited, or was begun");

    other.promise().is_leaving();
    let waiting = bench.claiming();
    bench.until(|status| status.waiting == 1).await;
    // Nothing comes of it, and whoever waits hears so.
    other.promise().stays();
    refusal(within(waiting).await.unwrap());

    other.promise().is_leaving();
    let waiting = bench.claiming();
    bench.until(|status| status.waiting == 1).await;
    refusal(bench.pool.claim(BUDGET).await);
    drop(other);
    let first = within(waiting).await.unwrap().unwrap();

    // A VM of its own pool is in use: its end is the next one's turn.
    let waiting = bench.claiming();
    bench.until(|status| status.waiting == 1).await;
    drop(first);
    within(waiting).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn those_for_whom_memory_does_not_suffice_hear_so_and_the_others_wait() {
    let bench = bench("min=0\nmax=8", 150, Fakes::default());
    let other = bench.admission.reserve(140).unwrap();
    other.promise().is_leaving();
    let claims = futures_util::future::join_all((0..5).map(|_| async { bench.pool.claim(BUDGET).await }));
    let ended = async {
        bench.until(|status| status.waiting == 2).await;
        drop(other);
    };
    let (claims, ()) = within(async { tokio::join!(claims, ended) }).await;
    assert_eq!(claims.iter().filter(|claim| claim.is_ok()).count(), 2, "{claims:?}");
    for claim in claims.into_iter().filter(Result::is_err) {
        assert_eq!(refusal(claim).resource, Resource::Memory);
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_without_vcpus_is_refused_at_once_and_its_vm_stands_ready_as_before() {
    let node = Admission::with(1000 << 20, Cores { count: 1, overcommit: 1 });
    let bench = bench_with("min=1\nmax=2", node, Fakes::default(), false);
    bench.until(|status| status.ready == 1).await;
    let other = bench.admission.admit(Charge::alone(8, 1)).unwrap();
    let begun = tokio::time::Instant::now();
    let full = refusal(bench.pool.claim(BUDGET).await);
    assert_eq!((full.resource, full.needed, full.available), (Resource::Vcpus, 1, 0));
    assert_eq!(begun.elapsed(), Duration::ZERO, "it waited");
    // And the one that was to take its place.
    bench.until(|status| (status.ready, status.claimed) == (2, 0)).await;

    other.promise().is_leaving();
    let waiting = bench.claiming();
    bench.until(|status| status.claimed == 1).await;
    drop(other);
    let first = within(waiting).await.unwrap().unwrap();
    let waiting = bench.claiming();
    bench.until(|status| status.claimed == 2).await;
    drop(first);
    within(waiting).await.unwrap().unwrap();
    // Without any ready, too: nothing is begun that could not run.
    let empty = bench_with("min=0\nmax=2", bench.admission.clone(), Fakes::default(), false);
    let _other = bench.admission.admit_living(Charge::alone(8, 1));
    assert_eq!((refusal(empty.pool.claim(BUDGET).await).resource, empty.restored()), (Resource::Vcpus, 0));
}

#[tokio::test(start_paused = true)]
async fn a_vm_that_was_granted_goes_back_as_it_is_if_its_turn_does_not_come_or_its_caller_leaves() {
    let bench = bench("min=1\nmax=1", 1000, Fakes::default());
    bench.until(|status| status.ready == 1).await;
    let free = bench.admission.available_mib();
    let turns = [1, 2].map(|_| bench.shared.wakes.take(&Flow::new(1), Urgency::Claim).now_or_never().unwrap());

    let late = bench.pool.claim(Duration::from_secs(1)).await;
    assert!(matches!(late, Err(ClaimError::Exhausted { .. })), "{late:?}");
    bench.until(|status| (status.ready, status.claimed) == (1, 0)).await;

    let leaving = bench.claiming();
    bench.until(|status| status.claimed == 1).await;
    let next = bench.claiming();
    bench.until(|status| status.waiting == 1).await;
    leaving.abort();
    // Whoever waits gets it.
    bench.until(|status| (status.waiting, status.claimed) == (0, 1)).await;
    drop(turns);
    let claim = within(next).await.unwrap().unwrap();
    assert_eq!(claim.start, StartKind::Paused);
    assert_eq!((bench.restored(), bench.fakes.rewound.load(Ordering::SeqCst)), (1, 0), "another VM was needed");
    drop(claim);
    bench.until(|status| status.ready == 1).await;
    assert_eq!(bench.admission.available_mib(), free);
}

#[tokio::test]
async fn vms_that_stand_ready_make_room_for_one_of_them_to_run() {
    let bench = bench("min=8\nmax=8", 180, Fakes::default());
    (0..20).for_each(|_| bench.pool.template.dirty().record(4096));
    let _other = bench.admission.reserve(92).unwrap();
    bench.until(|status| status.ready == 8).await;
    let claim = bench.pool.claim(BUDGET).await.unwrap();
    let status = bench.until(|status| status.claimed == 1).await;
    assert!(status.ready < 8 - 1, "{status:?}");
    drop(claim);
    // More than all of them have is not gained by giving them up.
    bench.until(|status| status.ready == 8).await;
    let _more = bench.admission.admit_living(Charge::process(1000));
    refusal(bench.pool.claim(BUDGET).await);
    bench.until(|status| (status.ready, status.claimed) == (8, 0)).await;
}
