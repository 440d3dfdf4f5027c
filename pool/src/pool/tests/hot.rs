//! The hot tier.

use tokio::io::AsyncWriteExt as _;

use super::*;

fn polite() -> Fakes {
    Fakes { usual: Some(Agent::Polite), ..Fakes::default() }
}

async fn says_hello(claim: &mut Claim) {
    let mut said = [0; 5];
    let asked = async {
        claim.stream.write_all(b"?").await.unwrap();
        claim.stream.read_exact(&mut said).await.unwrap();
    };
    tokio::time::timeout(BUDGET, asked).await.expect("the function says nothing");
    assert_eq!(&said, b"hello");
}

#[tokio::test]
async fn a_claim_takes_a_hot_vm_first_then_a_paused_one_and_both_are_replaced() {
    let bench = bench("min=2\nhot=1\nmax=6", 1000, polite());
    bench.until(|status| (status.ready, status.hot) == (1, 1)).await;
    let mut first = bench.pool.claim(BUDGET).await.unwrap();
    assert_eq!((first.start, first.timings.repair), (StartKind::Hot, Duration::ZERO));
    says_hello(&mut first).await;
    bench.until(|status| (status.ready, status.hot, status.claimed) == (1, 1, 1)).await;
    let both = [bench.pool.claim(BUDGET).await.unwrap(), bench.pool.claim(BUDGET).await.unwrap()];
    assert_eq!(both[0].start, StartKind::Hot);
    drop((first, both));
    let status = bench.until(|status| status.claimed + status.restoring + status.rewinding + status.warming == 0).await;
    assert_eq!(status.hot, 1, "{status:?}");
}

#[tokio::test]
async fn a_used_vm_becomes_hot_again_in_another_life() {
    let bench = bench("min=1\nhot=1\nmax=1", 1000, polite());
    let mut names = std::collections::HashSet::new();
    for _ in 0..5 {
        bench.until(|status| status.hot == 1).await;
        let mut claim = bench.pool.claim(BUDGET).await.unwrap();
        assert_eq!(claim.start, StartKind::Hot);
        says_hello(&mut claim).await;
        assert!(names.insert(claim.vm), "another life has another name");
    }
    assert_eq!(bench.fakes.made.load(Ordering::SeqCst), 1, "one VM, five lives");
}

#[tokio::test]
async fn a_hot_vm_whose_process_ends_leaves_the_tier_and_is_replaced() {
    // The first dies on its way into the tier, when it is woken.
    let fakes = Fakes { ordered: Mutex::new(vec![Ok(Agent::Dies)]), ..polite() };
    let bench = bench("min=1\nhot=1\nmax=2", 1000, fakes);
    bench.until(|status| status.hot == 1 && status.last_failure.is_some()).await;
    assert_eq!(bench.fakes.made.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_function_that_hangs_up_is_no_hot_vm_and_does_not_spin() {
    let bench = bench("min=1\nhot=1\nmax=2", 1000, Fakes { usual: Some(Agent::HangsUp), ..Fakes::default() });
    // Two failures are free; then it waits.
    let status = bench.until(|status| status.bound_by == Some(BoundBy::Failures)).await;
    assert!(status.last_failure.unwrap().contains("closed before anything was asked"), "it says why");
    let made = bench.fakes.made.load(Ordering::SeqCst);
    assert!(made <= 4, "{made} VMs were made hot in vain");
}

#[tokio::test(start_paused = true)]
async fn a_hot_vm_whose_connection_is_closed_for_being_silent_gets_another() {
    let bench = bench("min=1\nhot=1\nmax=1", 1000, Fakes { usual: Some(Agent::Tires), ..Fakes::default() });
    // Time passes by itself while nothing else happens.
    tokio::time::sleep(Duration::from_secs(90)).await;
    bench.until(|status| status.hot == 1).await;
    let mut claim = bench.pool.claim(BUDGET).await.unwrap();
    assert_eq!(claim.start, StartKind::Hot);
    says_hello(&mut claim).await;
    let made = (bench.fakes.made.load(Ordering::SeqCst), bench.fakes.rewound.load(Ordering::SeqCst));
    assert_eq!(made, (1, 0), "it is the same VM, in the same life");
}

#[tokio::test]
async fn what_says_something_unasked_is_not_hot() {
    let bench = bench("min=1\nhot=1\nmax=2", 1000, Fakes::default());
    bench.until(|status| status.bound_by == Some(BoundBy::Failures)).await;
}

#[tokio::test]
async fn claims_come_before_vms_are_made_hot() {
    let bench = bench("min=0\nmax=40", 4000, polite());
    bench.pool.set(PoolSpec { min: 20, hot: 20, max: 40, ..PoolSpec::default() });
    // All that is made is for those who wait; nobody gets a VM later for those that are made hot.
    let claims = futures_util::future::join_all((0..20).map(|_| bench.pool.claim(BUDGET))).await;
    for claim in &claims {
        assert!(claim.is_ok(), "{claim:?}");
    }
    drop(claims);
    bench.until(|status| status.hot == 20 && status.claimed == 0).await;
}

#[tokio::test]
async fn fewer_hot_ones_are_kept_when_fewer_are_wanted() {
    let bench = bench("min=3\nhot=3\nmax=6", 1000, polite());
    bench.until(|status| status.hot == 3).await;
    bench.pool.set(PoolSpec { min: 3, hot: 1, max: 6, ..PoolSpec::default() });
    bench.until(|status| (status.hot, status.ready) == (1, 2)).await;
    assert_eq!(bench.fakes.made.load(Ordering::SeqCst), 3, "they are rewound, not thrown away");
    bench.pool.set(PoolSpec { min: 0, hot: 0, max: 6, ..PoolSpec::default() });
    bench.until(|status| status.vms() == 0).await;
    bench.pool.drain();
    tokio::time::timeout(BUDGET, bench.admission.all_returned()).await.expect("memory is given back");
}

#[tokio::test]
async fn a_vm_that_the_node_has_no_room_to_run_stays_paused_until_there_is_room() {
    let bench = bench("min=2\nhot=2\nmax=2", 200, polite());
    let mut shortages = bench.admission.shortages_of_memory();
    // Before the pool's task has run: two can stand ready beside what somebody else has, and one can run.
    (0..20).for_each(|_| bench.pool.template.dirty().record(4096));
    let other = bench.admission.reserve(92).unwrap();
    let refused = tokio::time::timeout(BUDGET, shortages.changed()).await;
    refused.expect("the second VM was made hot although there is no room for it to run").unwrap();
    for _ in 0..50 {
        let status = bench.until(|status| status.warming == 0).await;
        assert_eq!((status.hot, status.ready), (1, 1), "{status:?}");
    }
    assert!(!shortages.has_changed().unwrap(), "it asks again although nothing has come free");
    drop(other);
    bench.until(|status| (status.hot, status.ready) == (2, 0)).await;
}

#[tokio::test(start_paused = true)]
async fn a_hot_vm_whose_guest_stops_answering_is_replaced_before_a_claim_meets_it() {
    let fakes = Fakes { ordered: Mutex::new(vec![Ok(Agent::Freezes)]), ..polite() };
    let bench = bench("min=1\nhot=1\nmax=2", 1000, fakes);
    bench.until(|status| status.hot == 1).await;
    assert_eq!(bench.fakes.made.load(Ordering::SeqCst), 1);
    // Time passes by itself while nothing else happens.
    tokio::time::sleep(Duration::from_secs(300)).await;
    let status = bench.until(|status| status.hot == 1).await;
    assert!(status.last_failure.unwrap().contains("does not answer"), "it says why");
    assert_eq!(bench.fakes.made.load(Ordering::SeqCst), 2, "one that answers stays");
    let mut claim = bench.pool.claim(BUDGET).await.unwrap();
    assert_eq!(claim.start, StartKind::Hot);
    says_hello(&mut claim).await;
}

#[tokio::test(start_paused = true)]
async fn a_claim_does_not_wait_for_the_answer_of_a_hot_vm() {
    let bench = bench("min=1\nhot=1\nmax=2", 1000, Fakes { usual: Some(Agent::Freezes), ..Fakes::default() });
    bench.until(|status| status.hot == 1).await;
    // It is asked after 15 s, and may take 5 s.
    tokio::time::sleep(Duration::from_secs(17)).await;
    let claim = bench.pool.claim(BUDGET).await.unwrap();
    assert_eq!((claim.start, claim.timings.queue.as_secs()), (StartKind::Hot, 0));
    tokio::time::sleep(Duration::from_secs(5)).await;
    let status = bench.pool.status().await.unwrap();
    assert_eq!((status.claimed, status.last_failure), (1, None), "it is its caller's now");
}
