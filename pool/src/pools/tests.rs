//! Tenants and their pools, with VMs that are fakes. Real ones are in `cli/tests/e2e`.

use std::{collections::HashMap, sync::Mutex};

use tokio::{
    runtime::{Builder, Handle, Runtime},
    sync::watch,
};
use uuid::Uuid;

use super::*;
use crate::{
    pool::tests::{BUDGET, Fakes, shared},
    template::tests::hollow,
};

fn tenant(name: &str) -> Tenant {
    name.parse().unwrap()
}

fn name() -> TemplateName {
    "x".parse().unwrap()
}

struct Bench {
    pools: Arc<Pools>,
    files: tempfile::TempDir,
}

impl Bench {
    fn new(standing: Option<&str>, pool: &str, memory_mib: u64) -> Self {
        let files = tempfile::tempdir().unwrap();
        Self { pools: node(&files, standing, pool, memory_mib), files }
    }
}

/// The pools of a node that starts over these files.
fn node(files: &tempfile::TempDir, standing: Option<&str>, pool: &str, memory_mib: u64) -> Arc<Pools> {
    let shared = shared(&Arc::new(Fakes::default()), memory_mib);
    let pools = Pools::new(shared, standing.map(tenant), files.path().join("pools.json")).unwrap();
    let text = format!("name='x'\ncommand='y'\nmemory='64MiB'\n[pool]\n{pool}");
    pools.publish(hollow(files.path(), &text));
    Arc::new(pools)
}

/// Asks until it is so.
async fn until(pools: &Pools, of: &str, wanted: impl Fn(&PoolStatus) -> bool) -> PoolStatus {
    let search = async {
        loop {
            let status = pools.status(&tenant(of), &name()).await.unwrap();
            if wanted(&status) {
                return status;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(BUDGET, search).await.expect("the pool never got there")
}

#[tokio::test]
async fn a_tenants_pool_begins_with_its_first_claim_and_only_the_standing_one_before() {
    let Bench { pools, .. } = &Bench::new(Some("default"), "min=1\nmax=4", 1000);
    until(pools, "default", |status| status.ready == 1).await;
    assert!(pools.statuses(&tenant("a")).await.is_empty());
    assert_eq!(pools.status(&tenant("a"), &name()).await.unwrap().vms(), 0);
    let claim = pools.take(&tenant("a"), &name(), BUDGET).await.unwrap();
    let of_a = until(pools, "a", |status| (status.claimed, status.ready) == (1, 1)).await;
    assert_eq!(of_a.tenant, tenant("a"));
    assert_eq!(pools.status(&tenant("default"), &name()).await.unwrap().claimed, 0, "another's VM was taken");
    drop(claim);
    assert!(matches!(
        pools.take(&tenant("a"), &"other".parse().unwrap(), BUDGET).await,
        Err(ClaimError::UnknownTemplate(_))
    ));
}

#[tokio::test]
async fn a_vm_is_its_tenants_through_all_its_lives() {
    let Bench { pools, .. } = &Bench::new(None, "min=0\nmax=1", 100);
    let of = async |who: &str| pools.take(&tenant(who), &name(), Duration::from_millis(300)).await;
    let first = of("a").await.unwrap();
    let vm = first.slot().unwrap();
    assert!(matches!(of("b").await, Err(ClaimError::NoCapacity { .. })), "there is memory for one VM");
    drop(first);
    // It is destroyed for b, however often it could have been rewound.
    let second = loop {
        match pools.take(&tenant("b"), &name(), BUDGET).await {
            Ok(taken) => break taken,
            Err(error) => assert!(matches!(error, ClaimError::NoCapacity { .. }), "{error}"),
        }
        tokio::task::yield_now().await;
    };
    assert_ne!(second.slot(), Some(vm));
}

#[tokio::test]
async fn more_claims_than_the_template_takes_at_once_are_refused_at_once() {
    let Bench { pools, .. } = &Bench::new(None, "min=0\nmax=4\nconcurrency=2", 1000);
    let of = async |who: &str| pools.take(&tenant(who), &name(), BUDGET).await;
    let (first, second) = (of("a").await.unwrap(), of("b").await.unwrap());
    assert!(matches!(of("a").await, Err(ClaimError::Concurrency { limit: 2, .. })), "tenants share the limit");
    drop(first);
    let third = of("a").await.unwrap();
    // A claim that fails, or becomes a sandbox, gives its place back.
    assert!(second.keep().is_some());
    assert!(of("b").await.is_ok());
    drop(third);
}

#[tokio::test]
async fn whoever_was_answered_may_ask_again_before_its_vm_is_back() {
    let Bench { pools, .. } = &Bench::new(None, "min=0\nmax=4\nconcurrency=1", 1000);
    let first: stasis_pool_api::Claim = pools.take(&tenant("a"), &name(), BUDGET).await.unwrap().into();
    let refused = pools.take(&tenant("a"), &name(), BUDGET).await;
    assert!(matches!(refused, Err(ClaimError::Concurrency { limit: 1, .. })));
    first.lease.served();
    assert!(pools.take(&tenant("a"), &name(), BUDGET).await.is_ok());
}

#[tokio::test]
async fn a_tenants_own_limit_and_schedule_hold_for_it_alone_and_after_a_restart() {
    let bench = Bench::new(None, "min=0\nmax=4\nconcurrency=3", 2000);
    let patch = |text: &str| serde_json::from_str::<PoolPatch>(text).unwrap();
    let all_week = r#"{"concurrency": 1, "schedule": [
        {"days": ["mon","tue","wed","thu","fri","sat","sun"], "from": "00:00", "to": "12:00", "min": 2},
        {"days": ["mon","tue","wed","thu","fri","sat","sun"], "from": "12:00", "to": "00:00", "min": 2}]}"#;
    bench.pools.set(&tenant("a"), &name(), &patch(all_week)).unwrap();
    for pools in [&bench.pools, &node(&bench.files, None, "min=0\nmax=4\nconcurrency=3", 2000)] {
        let status = until(pools, "a", |status| status.ready == 2).await;
        assert_eq!((status.settings.concurrency, status.settings.schedule.len()), (Some(1), 2));
        let of = async |who: &str| pools.take(&tenant(who), &name(), BUDGET).await;
        let first = of("a").await.unwrap();
        assert!(matches!(of("a").await, Err(ClaimError::Concurrency { limit: 1, .. })));
        let others = [of("b").await.unwrap(), of("b").await.unwrap()];
        assert!(matches!(of("b").await, Err(ClaimError::Concurrency { limit: 3, .. })), "tenants share the template's");
        drop((first, others));
        assert!(of("a").await.is_ok());
    }
    match bench.pools.set(&tenant("a"), &name(), &patch(r#"{"concurrency": 4}"#)) {
        Err(SetPoolError::Invalid(reason)) => {
            assert!(reason.contains("must be 1 to 3, which the template"), "{reason}")
        }
        other => panic!("{other:?}"),
    }
    bench.pools.set(&tenant("a"), &name(), &patch(r#"{"concurrency": 0, "schedule": []}"#)).unwrap();
    let status = until(&bench.pools, "a", |status| status.target == 0).await;
    assert_eq!(status.settings.concurrency, Some(3));
    let three =
        [bench.pools.take(&tenant("a"), &name(), BUDGET).await, bench.pools.take(&tenant("a"), &name(), BUDGET).await];
    assert!(three.iter().all(Result::is_ok));
}

#[tokio::test]
async fn what_is_set_holds_for_one_tenant_and_after_a_restart() {
    let bench = Bench::new(Some("default"), "min=1\nmax=4", 2000);
    let patch = |min| PoolPatch { min: Some(min), ..PoolPatch::default() };
    bench.pools.set(&tenant("a"), &name(), &patch(3)).unwrap();
    until(&bench.pools, "a", |status| status.ready == 3).await;
    until(&bench.pools, "default", |status| status.ready == 1).await;
    match bench.pools.set(&tenant("a"), &name(), &patch(5)) {
        Err(SetPoolError::Invalid(reason)) => {
            assert_eq!(reason, "pool.min is 5, but must be 0 to 1000, and at most pool.max, which is 4")
        }
        other => panic!("{other:?}"),
    }
    let other = bench.pools.set(&tenant("a"), &"other".parse().unwrap(), &patch(1));
    assert!(matches!(other, Err(SetPoolError::UnknownTemplate(_))), "{other:?}");
    bench.pools.drain();

    let again = node(&bench.files, Some("default"), "min=1\nmax=4", 2000);
    assert_eq!(until(&again, "a", |status| status.ready == 3).await.settings.min, 3);
    until(&again, "default", |status| status.ready == 1).await;
    // The template no longer allows it.
    let changed = node(&bench.files, None, "min=1\nmax=2", 2000);
    assert_eq!(until(&changed, "a", |status| status.ready == 1).await.settings.min, 1);
}

#[tokio::test]
async fn claims_go_to_the_successor_of_a_template_and_to_none_that_was_removed() {
    let bench = Bench::new(None, "min=1\nmax=4", 2000);
    let before = bench.pools.template(&name()).unwrap();
    let taken = bench.pools.take(&tenant("a"), &name(), BUDGET).await.unwrap();
    let old = bench.pools.publish(hollow(bench.files.path(), "name='x'\ncommand='z'\nmemory='64MiB'"));
    assert!(old.is_some_and(|old| Arc::ptr_eq(&old, &before)) && !bench.pools.serves(&before));
    drop(taken);
    assert!(bench.pools.take(&tenant("a"), &name(), BUDGET).await.is_ok());
    bench.pools.refuse("y".parse().unwrap(), "damaged".into());
    let refused = bench.pools.take(&tenant("a"), &"y".parse().unwrap(), BUDGET).await.err();
    assert!(matches!(refused, Some(ClaimError::Broken { .. })), "{refused:?}");
    assert!(bench.pools.remove(&name()) && !bench.pools.remove(&name()));
    let gone = bench.pools.take(&tenant("a"), &name(), BUDGET).await.err();
    assert!(matches!(gone, Some(ClaimError::UnknownTemplate(_))), "{gone:?}");
}

/// Whose each VM ever was, and whether somebody has it.
#[derive(Default)]
struct Ledger(Mutex<HashMap<Uuid, (Tenant, bool)>>);

impl Ledger {
    fn taken(&self, vm: Uuid, by: &Tenant) {
        let mut vms = self.0.lock().unwrap();
        let (owner, is_in_use) = vms.entry(vm).or_insert_with(|| (by.clone(), false));
        assert_eq!(owner, by, "VM {vm} has served two tenants");
        assert!(!std::mem::replace(is_in_use, true), "VM {vm} has two owners");
    }

    fn given_back(&self, vm: Uuid) {
        self.0.lock().unwrap().get_mut(&vm).unwrap().1 = false;
    }
}

/// A node, in a runtime of its own so that it can be killed: all its tasks end wherever they are.
struct Killable {
    runtime: Mutex<Option<Runtime>>,
    handle: Handle,
    pools: Arc<Pools>,
    _files: tempfile::TempDir,
}

impl Killable {
    /// Memory for ten VMs.
    fn start() -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let Bench { pools, files } = {
            let _inside = runtime.enter();
            Bench::new(None, "min=2\nmax=10", 720)
        };
        let handle = runtime.handle().clone();
        Self { runtime: Mutex::new(Some(runtime)), handle, pools, _files: files }
    }

    fn kill(&self) {
        if let Some(runtime) = self.runtime.lock().unwrap().take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Killable {
    fn drop(&mut self) {
        self.kill();
    }
}

/// One request, served by the node's own tasks. None: the node is gone.
async fn request(
    node: &Killable,
    by: Tenant,
    ledger: &Arc<Ledger>,
    answered: &watch::Sender<usize>,
) -> Option<Result<(), ClaimError>> {
    let (pools, ledger, answered) = (Arc::clone(&node.pools), Arc::clone(ledger), answered.clone());
    let served = node.handle.spawn(async move {
        let taken = pools.take(&by, &name(), BUDGET).await?;
        let vm = taken.slot().unwrap();
        ledger.taken(vm, &by);
        // Others come between, as while a function works.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        ledger.given_back(vm);
        answered.send_modify(|answered| *answered += 1);
        drop(taken);
        Ok(())
    });
    match tokio::time::timeout(BUDGET * 2, served).await.expect("a caller hangs") {
        Ok(outcome) => Some(outcome),
        Err(gone) if gone.is_cancelled() => None,
        Err(broken) => std::panic::resume_unwind(broken.into_panic()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_claims_of_two_tenants_on_ten_vms_with_the_node_killed_amid_them() {
    let (mut cut, mut served) = (0, 0);
    for round in 0..10 {
        let (ledger, answered) = (Arc::new(Ledger::default()), watch::Sender::new(0));
        let mut left: Vec<Tenant> = (0..100).map(|caller| tenant(if caller % 2 == 0 { "a" } else { "b" })).collect();
        // The first node is killed when some have been answered; the second lives.
        for kill_at in [Some(round * 5), None] {
            let node = Killable::start();
            let requests = left.iter().map(|by| request(&node, by.clone(), &ledger, &answered));
            let mut all = std::pin::pin!(join_all(requests.collect::<Vec<_>>()));
            let outcomes = match kill_at {
                None => all.await,
                Some(some) => {
                    let mut enough = answered.subscribe();
                    // Polled once, so that all have come.
                    let early = tokio::select! {
                        biased;
                        outcomes = &mut all => Some(outcomes),
                        _ = enough.wait_for(|answered| *answered >= some) => None,
                    };
                    match early {
                        Some(outcomes) => outcomes,
                        None => {
                            node.kill();
                            all.await
                        }
                    }
                }
            };
            let mut next = Vec::new();
            for (by, outcome) in left.into_iter().zip(outcomes) {
                match outcome {
                    None => next.push(by),
                    Some(Ok(())) => served += 1,
                    // One that was killed may still have said why it stopped.
                    Some(Err(error)) => {
                        // A tenant that has no VM while the other has all of them is refused at once.
                        let full = matches!(error, ClaimError::Exhausted { .. } | ClaimError::NoCapacity { .. });
                        assert!(kill_at.is_some() || full, "{error}");
                    }
                }
            }
            cut += next.len();
            left = next;
        }
        assert!(left.is_empty(), "{} callers heard nothing of a node that lives", left.len());
    }
    assert!(cut > 0, "no node was killed amid its work");
    println!("{served} of 1000 were served");
    assert!(served > 200, "{served} of 1000 were served");
}
