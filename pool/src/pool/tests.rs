//! The pool's state machine, with VMs that are fakes. Real ones are in `cli/tests/e2e`.

mod hot;
mod model;
mod room;
mod settings;
mod starts;
mod weights;

use std::sync::{
    Mutex,
    atomic::{AtomicU32, Ordering},
};

use futures_util::future::{BoxFuture, FutureExt};
use stasis_guest_wire::wake::Step;
use stasis_pool_api::Claim;
use tokio::{io::AsyncReadExt, sync::Semaphore};
use uuid::Uuid;

use super::*;
use crate::{
    admission::{Charge, Reservation},
    restore::Restore,
    template::tests::hollow,
    vmm::fake::{self, Agent},
};

pub(crate) const BUDGET: Duration = Duration::from_secs(20);

/// Makes fakes: first those ordered, then honest ones. An `Err` is a restore that fails.
#[derive(Debug, Default)]
pub(crate) struct Fakes {
    pub(crate) ordered: Mutex<Vec<Result<Agent, String>>>,
    /// What they are that nobody ordered; honest if not given.
    pub(crate) usual: Option<Agent>,
    pub(crate) made: AtomicU32,
    pub(crate) rewound: AtomicU32,
    pub(crate) gate: Option<Arc<Semaphore>>,
    /// How long each restore takes.
    pub(crate) takes: Duration,
}

impl Restore for Arc<Fakes> {
    fn restore(
        &self,
        template: Arc<Template>,
        reservation: Reservation,
    ) -> BoxFuture<'_, Result<Paused, RestoreError>> {
        async move {
            if let Some(gate) = &self.gate {
                gate.acquire().await.unwrap().forget();
            }
            if !self.takes.is_zero() {
                tokio::time::sleep(self.takes).await;
            }
            self.made.fetch_add(1, Ordering::SeqCst);
            let next = self.ordered.lock().unwrap().pop().unwrap_or(Ok(self.usual.unwrap_or(Agent::Honest)));
            let agent = next.map_err(|why| RestoreError::Vmm(crate::vmm::VmmError::Failed(why)))?;
            let (vmm, _) = fake::start(agent, reservation);
            let slot = Slot {
                id: Uuid::new_v4(),
                vmm,
                template,
                disk: tempfile::tempfile().unwrap(),
                generation: 1,
                attached: None,
            };
            Ok(Paused { id: Uuid::new_v4(), slot, took: Duration::from_millis(1) })
        }
        .boxed()
    }

    fn rewind(&self, used: Slot) -> BoxFuture<'_, Result<Paused, RestoreError>> {
        self.rewound.fetch_add(1, Ordering::SeqCst);
        async move {
            let slot = used.rewind_machine().await?;
            Ok(Paused { id: Uuid::new_v4(), slot, took: Duration::from_millis(1) })
        }
        .boxed()
    }
}

/// What the pools of a node share, with fakes for VMs.
pub(crate) fn shared(fakes: &Arc<Fakes>, memory_mib: u64) -> Arc<Shared> {
    shared_with(fakes, Admission::new(memory_mib << 20))
}

fn shared_with(fakes: &Arc<Fakes>, admission: Admission) -> Arc<Shared> {
    Arc::new(Shared {
        source: Box::new(Arc::clone(fakes)),
        admission,
        restores: Turns::new(4),
        wakes: Turns::new(2),
        warmings: Turns::new(1),
        outgrown: mpsc::unbounded_channel().0,
    })
}

struct Bench {
    pool: Pool,
    fakes: Arc<Fakes>,
    admission: Admission,
    shared: Arc<Shared>,
    _files: tempfile::TempDir,
}

fn bench(pool: &str, memory_mib: u64, fakes: Fakes) -> Bench {
    bench_of(pool, memory_mib, fakes, false)
}

fn bench_of(pool: &str, memory_mib: u64, fakes: Fakes, is_begun_by_claim: bool) -> Bench {
    bench_with(pool, Admission::new(memory_mib << 20), fakes, is_begun_by_claim)
}

fn bench_with(pool: &str, admission: Admission, fakes: Fakes, is_begun_by_claim: bool) -> Bench {
    let files = tempfile::tempdir().unwrap();
    let template = hollow(files.path(), &format!("name='x'\ncommand='y'\nmemory='64MiB'\n[pool]\n{pool}"));
    let fakes = Arc::new(fakes);
    let shared = shared_with(&fakes, admission.clone());
    let tenancy = Tenancy { tenant: "default".parse().unwrap(), is_begun_by_claim };
    let settings = template.info().spec.pool.clone();
    let pool = Pool::start(Arc::new(template), settings, tenancy, Arc::clone(&shared));
    Bench { pool, fakes, admission, shared, _files: files }
}

impl Bench {
    /// Asks until the pool's status is as wanted; every question is answered after all that happened before it.
    async fn until(&self, wanted: impl Fn(&PoolStatus) -> bool) -> PoolStatus {
        // By the real clock: one that is paused stands still while we ask.
        let begun = Instant::now();
        loop {
            let status = self.pool.status().await.unwrap();
            if wanted(&status) {
                return status;
            }
            assert!(begun.elapsed() < BUDGET, "the pool never got there, but was {status:?}");
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn a_claim_takes_a_ready_vm_and_starts_its_replacement() {
    let bench = bench("min=2\nmax=4", 1000, Fakes::default());
    bench.until(|status| status.ready == 2).await;
    let mut claim = bench.pool.claim(BUDGET).await.unwrap();
    assert_eq!(claim.start, StartKind::Paused);
    let mut said = [0; 5];
    claim.stream.read_exact(&mut said).await.unwrap();
    assert_eq!(&said, b"hello");
    bench.until(|status| (status.ready, status.claimed) == (2, 1)).await;
    let first = claim.vm;
    drop(claim);
    bench.until(|status| (status.ready, status.claimed) == (3, 0)).await;
    let (made, rewound) = (bench.fakes.made.load(Ordering::SeqCst), bench.fakes.rewound.load(Ordering::SeqCst));
    assert_eq!((made, rewound), (3, 1));
    for _ in 0..3 {
        let next = bench.pool.claim(BUDGET).await.unwrap();
        assert_ne!(next.vm, first, "another life has another name");
    }
}

#[tokio::test]
async fn a_steady_load_is_served_by_the_same_vms() {
    let bench = bench("min=1\nmax=4", 1000, Fakes::default());
    for _ in 0..100 {
        let claims = futures_util::future::join_all((0..2).map(|_| bench.pool.claim(BUDGET))).await;
        assert!(claims.iter().all(Result::is_ok));
        drop(claims);
    }
    let made = bench.fakes.made.load(Ordering::SeqCst);
    assert!(made <= 4, "{made} VMs were restored");
}

#[tokio::test]
async fn what_a_burst_needed_is_given_up_when_it_is_over() {
    let bench = bench("min=1\nmax=10", 10_000, Fakes::default());
    drop(futures_util::future::join_all((0..8).map(|_| bench.pool.claim(BUDGET))).await);
    bench.until(|status| status.ready >= 8 && status.claimed == 0).await;
    for _ in 0..8 * 60 {
        drop(bench.pool.claim(BUDGET).await.unwrap());
        bench.until(|status| status.claimed == 0).await;
    }
    let status = bench.until(|status| status.rewinding == 0 && status.restoring == 0).await;
    assert!(status.vms() <= 3, "{status:?}");
}

#[tokio::test]
async fn where_memory_is_short_nothing_is_kept_beyond_the_target() {
    let bench = bench("min=1\nmax=4", 160, Fakes::default());
    bench.until(|status| status.ready == 1).await;
    let claims = [bench.pool.claim(BUDGET).await.unwrap(), bench.pool.claim(BUDGET).await.unwrap()];
    drop(claims);
    let status = bench.until(|status| (status.claimed, status.rewinding, status.restoring) == (0, 0, 0)).await;
    assert_eq!(status.ready, 1);
}

#[tokio::test]
async fn what_a_burst_has_left_goes_when_somebody_needs_the_memory() {
    let bench = bench("min=1\nmax=10", 800, Fakes::default());
    drop(futures_util::future::join_all((0..6).map(|_| bench.pool.claim(BUDGET))).await);
    bench.until(|status| status.ready >= 5 && status.claimed == 0).await;
    let needed = bench.admission.admit_returning(Charge::process(500), None).await.unwrap();
    bench.until(|status| (status.ready, status.vms()) == (1, 1)).await;
    drop(needed);
}

#[tokio::test]
async fn a_caller_who_leaves_during_the_wake_costs_no_vm() {
    let bench = bench("min=1\nmax=4", 1000, Fakes::default());
    bench.until(|status| status.ready == 1).await;
    for _ in 0..20 {
        let claim = bench.pool.claim(BUDGET);
        // Polled until it has a VM, then dropped.
        tokio::select! {
            biased;
            _ = claim => {}
            () = async { while bench.pool.status().await.unwrap().claimed == 0 {} } => {}
        }
        bench.until(|status| status.claimed == 0 && status.rewinding == 0 && status.restoring == 0).await;
    }
    let made = bench.fakes.made.load(Ordering::SeqCst);
    assert!(made <= 3, "{made} VMs were restored for 20 callers who left");
}

#[tokio::test]
async fn a_vm_that_cannot_be_rewound_is_destroyed() {
    let fakes = Fakes { ordered: Mutex::new(vec![Ok(Agent::KeepsTraces); 10]), ..Fakes::default() };
    let bench = bench("min=1\nmax=4", 1000, fakes);
    let claim = bench.pool.claim(BUDGET).await.unwrap();
    bench.until(|status| (status.ready, status.claimed) == (1, 1)).await;
    drop(claim);
    bench.until(|status| (status.ready, status.vms()) == (1, 1)).await;
    assert_eq!(bench.fakes.rewound.load(Ordering::SeqCst), 1, "it was tried");
    assert_eq!(bench.admission.available_mib(), 1000 - 72, "its memory is back");
}

#[tokio::test]
async fn a_vm_whose_function_failed_is_not_used_again() {
    let bench = bench("min=1\nmax=4", 1000, Fakes::default());
    let claim = bench.pool.claim(BUDGET).await.unwrap();
    claim.lease.report_failure("r1", "it broke off");
    drop(claim);
    bench.until(|status| (status.ready, status.vms()) == (1, 1)).await;
    assert_eq!(bench.fakes.rewound.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn no_two_claims_get_one_vm() {
    let bench = bench("min=3\nmax=10", 10_000, Fakes::default());
    let claims = futures_util::future::join_all((0..10).map(|_| bench.pool.claim(BUDGET))).await;
    let mut vms: Vec<_> = claims.iter().map(|claim| claim.as_ref().unwrap().vm).collect();
    vms.sort();
    vms.dedup();
    assert_eq!(vms.len(), 10);
}

#[tokio::test]
async fn a_vm_that_does_not_prove_its_repair_is_never_handed_out() {
    let all = [Agent::Refuses(Step::Entropy), Agent::Omits(Step::Runtimes), Agent::Booted, Agent::Dies, Agent::Babbles];
    for bad in all {
        let fakes = Fakes { ordered: Mutex::new(vec![Ok(bad)]), ..Fakes::default() };
        let bench = bench("min=1\nmax=4", 1000, fakes);
        bench.until(|status| status.ready == 1).await;
        let claim = bench.pool.claim(BUDGET).await.unwrap();
        let status = bench.until(|status| status.claimed == 1).await;
        assert!(status.last_failure.is_some(), "{bad:?} goes unnoticed");
        drop(claim);
    }
}

#[tokio::test]
async fn a_vm_is_woken_at_its_page_and_its_first_connection_is_the_function_s() {
    let fakes = Fakes { ordered: Mutex::new(vec![Ok(Agent::Prompt); 10]), ..Fakes::default() };
    let bench = bench("min=1\nmax=4", 1000, fakes);
    for _ in 0..2 {
        bench.until(|status| status.ready == 1).await;
        let mut claim = bench.pool.claim(BUDGET).await.unwrap();
        let mut heard = [0; 5];
        claim.stream.read_exact(&mut heard).await.unwrap();
        assert_eq!(&heard, b"hello", "and nothing of the agent's before it");
    }
    assert_eq!(bench.pool.status().await.unwrap().last_failure, None);
}

#[tokio::test]
async fn a_claim_without_time_left_is_told_so_and_costs_one_vm() {
    let fakes = Fakes { ordered: Mutex::new(vec![Ok(Agent::Silent); 10]), ..Fakes::default() };
    let bench = bench("min=3\nmax=9", 1000, fakes);
    bench.until(|status| status.ready == 3).await;
    let claimed = bench.pool.claim(Duration::from_millis(200)).await;
    assert!(matches!(claimed, Err(ClaimError::Exhausted { .. })), "{:?}", claimed.err());
    let status = bench.until(|status| (status.ready, status.claimed) == (3, 0)).await;
    assert_eq!(status.last_failure, None, "the template is not to blame");
    assert_eq!(bench.fakes.made.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn a_template_whose_vms_never_prove_anything_is_broken_and_says_why() {
    let bad = vec![Ok(Agent::Refuses(Step::WallClock)); 50];
    let bench = bench("min=1\nmax=4", 1000, Fakes { ordered: Mutex::new(bad), ..Fakes::default() });
    match bench.pool.claim(BUDGET).await {
        Err(ClaimError::Broken { reason, .. }) => assert!(reason.contains("WallClock"), "{reason}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn failing_restores_reach_the_claimer_and_do_not_spin() {
    let failures = (0..50).map(|_| Err("no image".to_owned())).collect();
    let bench = bench("min=2\nmax=4", 1000, Fakes { ordered: Mutex::new(failures), ..Fakes::default() });
    match bench.pool.claim(BUDGET).await {
        Err(ClaimError::Broken { reason, .. }) => assert!(reason.contains("no image"), "{reason}"),
        other => panic!("{other:?}"),
    }
    let status = bench.until(|status| status.restoring == 0).await;
    let made = bench.fakes.made.load(Ordering::SeqCst);
    assert!(made < 12 && status.ready == 0, "{made} restores were tried");
}

#[tokio::test(start_paused = true)]
async fn a_pool_whose_vms_failed_fills_itself_again_unasked() {
    let failures = (0..20).map(|_| Err("no image".to_owned())).collect();
    let bench = bench("min=2\nmax=4", 1000, Fakes { ordered: Mutex::new(failures), ..Fakes::default() });
    let begun = tokio::time::Instant::now();
    // Time runs by itself only while nothing else can happen: the wait goes on until the pool tells of its own.
    while bench.pool.status().await.unwrap().ready < 2 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(begun.elapsed() < Duration::from_secs(900), "{:?}", bench.pool.status().await);
    }
    assert!(begun.elapsed() > Duration::from_secs(10), "it tried twenty times within {:?}", begun.elapsed());
}

#[tokio::test]
async fn waiters_are_served_in_order_and_those_who_left_are_passed_over() {
    let gate = Arc::new(Semaphore::new(0));
    let fakes = Fakes { gate: Some(Arc::clone(&gate)), ..Fakes::default() };
    let bench = bench("min=0\nmax=1", 1000, fakes);
    let early = bench.pool.claim(Duration::from_millis(20)).await;
    match early {
        Err(ClaimError::Exhausted { retry_after, waited, .. }) => {
            assert!(retry_after >= Duration::from_secs(1) && waited >= Duration::from_millis(20));
        }
        other => panic!("{other:?}"),
    }
    let pool = bench.pool.clone();
    let late = tokio::spawn(async move { pool.claim(BUDGET).await });
    bench.until(|status| status.waiting == 1).await;
    gate.add_permits(10);
    let claim = late.await.unwrap().unwrap();
    assert_eq!(claim.start, StartKind::Cold);
}

#[tokio::test]
async fn memory_bounds_the_pool_and_its_return_refills_it() {
    let bench = bench("min=4\nmax=8", 150, Fakes::default());
    bench.until(|status| status.ready == 2 && status.restoring == 0).await;
    let first = bench.pool.claim(BUDGET).await.unwrap();
    let second = bench.pool.claim(BUDGET).await.unwrap();
    let third = bench.pool.claim(Duration::from_millis(50)).await;
    assert!(matches!(third, Err(ClaimError::Exhausted { .. })), "{third:?}");
    drop(first);
    let fourth = bench.pool.claim(BUDGET).await.unwrap();
    drop((second, fourth));
    bench.until(|status| status.ready == 2).await;
    bench.pool.drain();
    tokio::time::timeout(BUDGET, bench.admission.all_returned()).await.expect("memory is given back");
}

#[tokio::test]
async fn once_lives_are_measured_more_vms_stand_ready_than_could_run() {
    let bench = bench("min=1\nmax=8", 180, Fakes::default());
    bench.until(|status| status.ready == 1).await;
    assert_eq!(bench.admission.available_mib(), 180 - 72, "it counts with all of its memory");
    (0..20).for_each(|_| bench.pool.template.dirty().record(4096));
    drop(bench.pool.claim(BUDGET).await.unwrap());
    bench.until(|status| (status.ready, status.vms()) == (2, 2)).await;
    assert_eq!(bench.admission.available_mib(), 180 - 2 * 8 - 1, "each is expected to write 5 KiB");
    let claims = [bench.pool.claim(BUDGET).await.unwrap(), bench.pool.claim(BUDGET).await.unwrap()];
    bench.until(|status| (status.ready, status.claimed) == (1, 2)).await;
    // It stands ready, but is not run: that memory could be written to, and is promised to the two.
    match bench.pool.claim(Duration::from_millis(50)).await {
        Err(ClaimError::NoCapacity { full, .. }) => assert!(full.needed > full.available, "{full:?}"),
        other => panic!("{other:?}"),
    }
    let pool = bench.pool.clone();
    let waiting = tokio::spawn(async move { pool.claim(BUDGET).await });
    bench.until(|status| status.claimed == 3).await;
    drop(claims);
    waiting.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn where_the_pool_has_nothing_and_the_node_no_room_a_claim_is_refused_and_told_why() {
    let bench = bench("min=1\nmax=8", 50, Fakes::default());
    let begun = tokio::time::Instant::now();
    match bench.pool.claim(Duration::from_secs(3600)).await {
        Err(ClaimError::NoCapacity { full, .. }) => {
            assert_eq!((full.needed, full.available, full.limit), (72 << 20, 50 << 20, 50 << 20));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(begun.elapsed(), Duration::ZERO, "it waited");
    assert!(bench.pool.status().await.unwrap().no_capacity.is_some());
}

#[tokio::test]
async fn a_paused_vm_whose_process_dies_is_replaced() {
    let bench = bench("min=1\nmax=2", 1000, Fakes { ordered: Mutex::new(vec![Ok(Agent::Dies)]), ..Fakes::default() });
    bench.until(|status| status.ready == 1).await;
    // It dies when it is resumed, which is what a claim does first; the claim gets the next one.
    let claim = bench.pool.claim(BUDGET).await.unwrap();
    claim.lease.report_failure("request-1", "broke off");
    drop(claim);
    bench.until(|status| (status.ready, status.claimed) == (1, 0)).await;
}

#[tokio::test]
async fn a_drained_pool_sends_its_waiters_away() {
    let fakes = Fakes { gate: Some(Arc::new(Semaphore::new(0))), ..Fakes::default() };
    let bench = bench("min=1\nmax=2", 1000, fakes);
    let pool = bench.pool.clone();
    let waiter = tokio::spawn(async move { pool.claim(BUDGET).await });
    bench.until(|status| status.waiting == 1).await;
    bench.pool.drain();
    assert!(matches!(waiter.await.unwrap(), Err(ClaimError::UnknownTemplate(_))));
}

#[tokio::test]
async fn vms_that_outlive_their_pool_are_counted_until_they_end() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let _here = ::metrics::set_default_local_recorder(&recorder);
    let draining = || {
        let shown = recorder.handle().render();
        shown.lines().find_map(|line| line.strip_prefix("stasis_pool_draining ")).map(str::to_owned)
    };
    let bench = bench("min=2\nmax=2", 1000, Fakes::default());
    let claims = [bench.pool.claim(BUDGET).await.unwrap(), bench.pool.claim(BUDGET).await.unwrap()];
    let status = bench.pool.status().await.unwrap();
    assert!(status.offered_load.is_some_and(|load| load > 0.0), "{status:?}");
    bench.pool.drain();
    let ended = bench.pool.claim(BUDGET).await;
    assert!(matches!(ended, Err(ClaimError::UnknownTemplate(_))), "{ended:?}");
    assert_eq!(draining().as_deref(), Some("2"));
    let [first, second] = claims;
    drop(first);
    assert_eq!(draining().as_deref(), Some("1"));
    drop(second);
    assert_eq!(draining().as_deref(), Some("0"));
    tokio::time::timeout(BUDGET, bench.admission.all_returned()).await.expect("memory is given back");
}
