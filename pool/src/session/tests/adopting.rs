//! A node that is killed, and the next one: VMs that outlive it are taken over, and nothing else stays.

use std::task::Poll;

use tokio::runtime::{Builder, Runtime};

use super::*;

/// How often a node ends, at points that are spread over all that a sandbox goes through.
pub(super) const ENDS: u32 = 60;

/// A node in a runtime of its own. Dropping it kills it: all that it does is dropped where it stands, and nothing is told.
pub(super) struct Node {
    pub(super) bench: Bench,
    runtime: Runtime,
}

impl Node {
    /// As soon as it takes commands.
    pub(super) fn begin(world: &World) -> Self {
        Self::with(world, Arc::clone(&world.store))
    }

    fn with(world: &World, store: Arc<impl Store>) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let bench = runtime.block_on(within(Bench::on(world.clone(), store, 1000)));
        Self { bench, runtime }
    }

    /// With all that an earlier one has left taken over.
    pub(super) fn start(world: &World) -> Self {
        Self::begin(world).settled()
    }

    /// The same, with a store of its own.
    pub(super) fn storing_in(world: &World, store: Arc<impl Store>) -> Self {
        Self::with(world, store).settled()
    }

    fn settled(self) -> Self {
        self.run(async |bench| {
            let is_settled =
                |info: &SandboxInfo| info.pid.is_none() || info.certificate.is_some() || info.state == State::Failed;
            while !bench.sandboxes.list(None).await.iter().all(is_settled) {
                tokio::task::yield_now().await;
            }
        });
        self
    }

    pub(super) fn run<'a, T>(&'a self, work: impl AsyncFnOnce(&'a Bench) -> T) -> T {
        self.runtime.block_on(within(work(&self.bench)))
    }
}

/// Where the fakes live on.
pub(super) fn world() -> (Runtime, World) {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let world = World::new(runtime.handle().clone());
    (runtime, world)
}

/// Nothing is left of any VM, be it a moment later.
pub(super) fn is_bare(node: &Node, world: &World) {
    node.run(async |bench| {
        while bench.free_mib() < 1000 || !Place::all(world.vms()).unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    });
    assert!(world.saved.lock().unwrap().is_empty());
}

#[test]
fn what_runs_goes_on_and_what_is_suspended_stays_so_in_the_same_process() {
    let (_runtime, world) = world();
    let node = Node::start(&world);
    let (running, suspended, hibernated) = node.run(async |bench| {
        let running = bench.create(r#","idle":"0s""#).await;
        bench.sandboxes.hold(&running, "ci".parse().unwrap(), None).await.unwrap();
        let [suspended, hibernated] = [bench.create("").await, bench.create("").await];
        bench.sandboxes.pause(&suspended, PauseTo::Ram).await.unwrap();
        bench.sandboxes.pause(&hibernated, PauseTo::Disk).await.unwrap();
        // A request that the node takes with it.
        let visit = bench.sandboxes.visit(&running, LIMIT).await.unwrap();
        let shown = bench.show(&running).await;
        assert_eq!(shown.requests, 1);
        std::mem::forget(visit.lease);
        (shown, bench.show(&suspended).await, hibernated)
    });
    drop(node);

    let node = Node::start(&world);
    assert_eq!(node.bench.free_mib(), 1000 - 2 * 72, "their memory is theirs");
    node.run(async |bench| {
        let now = bench.show(running.id.as_str()).await;
        assert_eq!((now.state, now.pid), (State::Running, running.pid));
        assert_eq!((now.requests, now.holds.len()), (0, 1), "{now:?}");
        assert_eq!((now.ends_at, &now.certificate), (running.ends_at, &running.certificate));
        let visit = bench.sandboxes.visit(running.id.as_str(), LIMIT).await.unwrap();
        assert_eq!(visit.start, StartKind::Running);
        drop(visit);

        let now = bench.show(suspended.id.as_str()).await;
        assert_eq!((now.state, now.pid), (State::Suspended, suspended.pid));
        assert_eq!(now.time_left_ms, suspended.time_left_ms);
        let visit = bench.sandboxes.visit(suspended.id.as_str(), LIMIT).await.unwrap();
        assert_eq!(visit.start, StartKind::Resumed);
        let generation = bench.show(suspended.id.as_str()).await.certificate.unwrap()["generation"].as_u64();
        assert!(generation > Some(2), "above any that it may have been told of: {generation:?}");

        assert_eq!(bench.show(&hibernated).await.state, State::Hibernated);
        let visit = bench.sandboxes.visit(&hibernated, LIMIT).await.unwrap();
        assert_eq!(visit.start, StartKind::Resumed);
    });
    // And once more, with those that were taken over.
    drop(node);
    let node = Node::start(&world);
    node.run(async |bench| {
        assert_eq!(bench.show(running.id.as_str()).await.pid, running.pid);
        for id in [running.id.as_str(), suspended.id.as_str(), &hibernated] {
            drop(bench.sandboxes.visit(id, LIMIT).await.unwrap());
            bench.sandboxes.kill(id).await.unwrap();
        }
    });
    is_bare(&node, &world);
    assert!([running.pid, suspended.pid].into_iter().all(|pid| fake::born(pid.unwrap()).is_none()), "one lives");
}

#[test]
fn one_whose_vm_ended_meanwhile_has_failed_and_says_so() {
    let (runtime, world) = world();
    let node = Node::start(&world);
    let (kept, lost) = node.run(async |bench| {
        let (kept, lost) = (bench.create("").await, bench.create("").await);
        bench.sandboxes.pause(&kept, PauseTo::Disk).await.unwrap();
        (kept, bench.show(&lost).await)
    });
    drop(node);
    runtime.block_on(within(async { fake::born(lost.pid.unwrap()).unwrap().end().await })).unwrap();
    let node = Node::start(&world);
    node.run(async |bench| {
        assert_eq!(bench.show(&kept).await.state, State::Hibernated);
        let failed = bench.until(lost.id.as_str(), State::Failed).await;
        assert!(failed.failure.unwrap().contains("running"));
        let refused = bench.sandboxes.visit(lost.id.as_str(), LIMIT).await;
        assert!(matches!(refused, Err(SandboxError::State { state: State::Failed, .. })), "{refused:?}");
        bench.sandboxes.kill(lost.id.as_str()).await.unwrap();
        bench.sandboxes.kill(&kept).await.unwrap();
    });
    is_bare(&node, &world);
}

#[test]
fn one_whose_time_ran_out_without_a_node_is_ended_by_the_next() {
    let (_runtime, world) = world();
    let node = Node::start(&world);
    let [kills, pauses] = node.run(async |bench| {
        let kills = bench.create("").await;
        [kills, bench.create(r#","on_timeout":"pause","idle":"0s""#).await]
    });
    drop(node);
    // As if the hour that each has were over.
    for id in [&kills, &pauses] {
        FutureExt::now_or_never(async {
            let record = world.store.get(&id.parse().unwrap()).await.unwrap();
            let now = stasis_pool_api::Timestamp::now();
            let mut change = record.edit(now);
            change.facts().deadline = Some(Deadline::At(now));
            world.store.commit(change).await.unwrap();
        })
        .unwrap();
    }
    let node = Node::start(&world);
    node.run(async |bench| {
        bench.until(&pauses, State::Suspended).await;
        while bench.sandboxes.inspect(&kills).await.is_ok() {
            tokio::task::yield_now().await;
        }
        bench.sandboxes.kill(&pauses).await.unwrap();
    });
    is_bare(&node, &world);
}

/// Everything that a sandbox can go through. `known`: what a caller has been told of.
async fn go_through_all(bench: &Bench, known: &Mutex<Option<String>>) {
    let id = bench.create(r#","idle":"0s","hibernate_after":"0s""#).await;
    *known.lock().unwrap() = Some(id.clone());
    for to in [PauseTo::Ram, PauseTo::Disk] {
        bench.sandboxes.pause(&id, to).await.unwrap();
        drop(bench.sandboxes.visit(&id, LIMIT).await.unwrap());
    }
    bench.sandboxes.fork(&id, 1, LIMIT).await.unwrap();
    bench.sandboxes.pause(&id, PauseTo::Ram).await.unwrap();
    bench.sandboxes.resume(&id, None).await.unwrap();
}

/// Lets the node do so many rounds of that, in each of which every task of it that can do something does one step. How many it was.
pub(super) fn rounds(node: &Node, known: &Mutex<Option<String>>, most: u32) -> u32 {
    node.run(async |bench| {
        let mut done = 0;
        let mut all = Box::pin(go_through_all(bench, known));
        std::future::poll_fn(move |context| {
            if done == most || all.as_mut().poll(context).is_ready() {
                return Poll::Ready(done);
            }
            done += 1;
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await
    })
}

#[test]
fn a_node_killed_at_any_point_loses_nothing_that_a_caller_knows_of() {
    let (_runtime, world) = world();
    let whole = rounds(&Node::start(&world), &Mutex::default(), u32::MAX);
    for kill in 0..ENDS {
        let known = Mutex::default();
        let at = whole / ENDS * kill + kill;
        rounds(&Node::start(&world), &known, at);
        let node = Node::start(&world);
        node.run(async |bench| {
            let known = known.into_inner().unwrap();
            if let Some(id) = known {
                let visit = bench.sandboxes.visit(&id, LIMIT).await;
                assert!(visit.is_ok(), "killed at {at} of {whole}: {:?}, {:?}", bench.show(&id).await, visit.err());
            }
            for left in bench.sandboxes.list(None).await {
                bench.sandboxes.kill(left.id.as_str()).await.unwrap();
            }
            assert_eq!(bench.sandboxes.list(None).await.len(), 0, "killed at {at} of {whole}");
        });
        is_bare(&node, &world);
    }
}
