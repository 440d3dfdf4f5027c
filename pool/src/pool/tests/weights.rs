//! Pools that share turns: by weight, and those first for whose VMs somebody waits.

use super::*;

/// Pools that share one turn; the gate lets one restore after the other be done.
struct Node {
    shared: Arc<Shared>,
    gate: Arc<Semaphore>,
    files: tempfile::TempDir,
}

impl Node {
    fn new() -> Self {
        let gate = Arc::new(Semaphore::new(0));
        let fakes = Arc::new(Fakes { gate: Some(Arc::clone(&gate)), ..Fakes::default() });
        let shared = Shared {
            source: Box::new(fakes),
            admission: Admission::new(100_000 << 20),
            restores: Turns::new(1),
            wakes: Turns::new(2),
            warmings: Turns::new(1),
            outgrown: mpsc::unbounded_channel().0,
        };
        Self { shared: Arc::new(shared), gate, files: tempfile::tempdir().unwrap() }
    }

    /// One whose restores of what it wants stand in line.
    async fn pool(&self, weight: u32, min: u32) -> Pool {
        let template = hollow(self.files.path(), "name='x'\ncommand='y'\nmemory='64MiB'");
        let tenancy = Tenancy { tenant: "default".parse().unwrap(), is_begun_by_claim: false };
        let pool = Pool::start(Arc::new(template), wants(weight, min), tenancy, Arc::clone(&self.shared));
        is(&pool, |status| status.restoring == min).await;
        pool
    }

    /// Lets so many restores be done; how many each of the pools has got by them.
    async fn restored(&self, count: u32, pools: [&Pool; 2]) -> [u32; 2] {
        let before = [ready(pools[0]).await, ready(pools[1]).await];
        self.gate.add_permits(count as usize);
        let begun = Instant::now();
        loop {
            let got = [ready(pools[0]).await - before[0], ready(pools[1]).await - before[1]];
            if got[0] + got[1] == count {
                return got;
            }
            assert!(begun.elapsed() < BUDGET, "of {count} restores only {got:?} were done");
            tokio::task::yield_now().await;
        }
    }
}

fn wants(weight: u32, min: u32) -> PoolSpec {
    PoolSpec { min, max: 100, weight, ..PoolSpec::default() }
}

async fn ready(pool: &Pool) -> u32 {
    pool.status().await.unwrap().ready
}

async fn is(pool: &Pool, wanted: impl Fn(&PoolStatus) -> bool) {
    let begun = Instant::now();
    loop {
        let status = pool.status().await.unwrap();
        if wanted(&status) {
            return;
        }
        assert!(begun.elapsed() < BUDGET, "the pool never got there, but was {status:?}");
        tokio::task::yield_now().await;
    }
}

/// Three to one, but for the one that had its turn already, and a job's share.
fn three_to_one([more, less]: [u32; 2]) {
    assert!(more.abs_diff(12) <= 2, "of sixteen {more} and {less}");
}

#[tokio::test]
async fn restores_are_shared_by_weight_as_it_was_given_and_as_it_is_set() {
    let node = Node::new();
    let [one, other] = [node.pool(3, 40).await, node.pool(1, 40).await];
    three_to_one(node.restored(16, [&one, &other]).await);
    // What is asked for from now on tells of the new weight.
    for (pool, weight) in [(&one, 1), (&other, 3)] {
        let more = ready(pool).await;
        pool.set(wants(weight, 60));
        is(pool, |status| status.restoring == 60 - more).await;
    }
    three_to_one(node.restored(16, [&other, &one]).await);
}

#[tokio::test]
async fn a_restore_for_which_a_claim_waits_comes_before_all_others_be_it_begun_for_it_or_before() {
    // It has asked for one already, or asks for one now.
    for min in [1, 0] {
        let node = Node::new();
        let [one, other] = [node.pool(100, 20).await, node.pool(100, 20).await];
        let last = node.pool(1, min).await;
        let claiming = last.clone();
        let claim = tokio::spawn(async move { claiming.claim(BUDGET).await });
        is(&last, |status| (status.waiting, status.restoring) == (1, min + 1)).await;
        // One of the others has the turn, and ends it; the next is the claim's.
        node.gate.add_permits(2);
        let claim = tokio::time::timeout(BUDGET, claim).await.expect("it waits behind the others").unwrap().unwrap();
        assert_eq!((claim.start, ready(&one).await + ready(&other).await), (StartKind::Cold, 1));
    }
}
