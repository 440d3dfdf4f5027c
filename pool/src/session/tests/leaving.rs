//! A node that ends in order, and the next one; and VMs that do not answer the next one.

use stasis_state::Store;

use super::{
    adopting::{ENDS, Node, is_bare, rounds, world},
    *,
};

/// Ends in order: nothing is left of the node but VMs that go on, so many.
fn leaves(node: Node, vms: usize) {
    node.run(async |bench| {
        assert_eq!(bench.sandboxes.leave().await, vms);
        while bench.free_mib() < 1000 || !bench.sandboxes.read().is_empty() {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn a_node_that_leaves_has_every_sandbox_go_on_as_it_is() {
    let (_runtime, world) = world();
    let node = Node::start(&world);
    let all = node.run(async |bench| {
        let all = [bench.create("").await, bench.create("").await, bench.create("").await];
        bench.sandboxes.pause(&all[1], PauseTo::Ram).await.unwrap();
        bench.sandboxes.pause(&all[2], PauseTo::Disk).await.unwrap();
        let mut shown = Vec::new();
        for id in &all {
            shown.push(bench.show(id).await);
        }
        shown
    });
    leaves(node, 2);
    assert_eq!(Place::all(world.vms()).unwrap().len(), 2);

    let node = Node::start(&world);
    node.run(async |bench| {
        for (before, start) in all.iter().zip([StartKind::Running, StartKind::Resumed, StartKind::Resumed]) {
            let id = before.id.as_str();
            let now = bench.show(id).await;
            assert_eq!((now.state, now.pid, now.ends_at), (before.state, before.pid, before.ends_at));
            assert_eq!(now.time_left_ms, before.time_left_ms);
            assert_eq!(bench.sandboxes.visit(id, LIMIT).await.unwrap().start, start);
        }
    });
    // And once more, with those that were taken over.
    leaves(node, 3);
    let node = Node::start(&world);
    node.run(async |bench| {
        for one in &all {
            drop(bench.sandboxes.visit(one.id.as_str(), LIMIT).await.unwrap());
            bench.sandboxes.kill(one.id.as_str()).await.unwrap();
        }
    });
    is_bare(&node, &world);
}

#[test]
fn whenever_a_node_leaves_what_was_begun_has_ended_and_nothing_is_lost() {
    let (_runtime, world) = world();
    let whole = rounds(&Node::start(&world), &Mutex::default(), u32::MAX);
    for end in 0..ENDS {
        let known = Mutex::default();
        let at = whole / ENDS * end + end;
        let node = Node::start(&world);
        rounds(&node, &known, at);
        node.run(async |bench| bench.sandboxes.leave().await);
        let records = world.store.list(Query { limit: 9, ..Query::default() }).now_or_never().unwrap().unwrap().records;
        for record in &records {
            let quiet = [State::Running, State::Suspended, State::Hibernated];
            assert!(quiet.contains(&record.state()), "left at {at} of {whole}: {record:?}");
        }
        drop(node);
        let node = Node::start(&world);
        node.run(async |bench| {
            if let Some(id) = known.into_inner().unwrap() {
                let visit = bench.sandboxes.visit(&id, LIMIT).await;
                assert!(visit.is_ok(), "left at {at} of {whole}: {:?}, {:?}", bench.show(&id).await, visit.err());
            }
            for left in bench.sandboxes.list(None).await {
                bench.sandboxes.kill(left.id.as_str()).await.unwrap();
            }
        });
        is_bare(&node, &world);
    }
}

#[test]
fn what_can_be_saved_is_saved_and_the_rest_goes_on() {
    let (_runtime, world) = world();
    let node = Node::start(&world);
    let [saved, suspended] = node.run(async |bench| {
        let all = [bench.create("").await, bench.create("").await];
        bench.sandboxes.pause(&all[1], PauseTo::Ram).await.unwrap();
        bench.sandboxes.save().await;
        all
    });
    leaves(node, 0);
    let node = Node::start(&world);
    node.run(async |bench| {
        for id in [&saved, &suspended] {
            assert_eq!(bench.show(id).await.state, State::Hibernated);
            assert_eq!(bench.sandboxes.visit(id, LIMIT).await.unwrap().start, StartKind::Resumed);
            bench.sandboxes.kill(id).await.unwrap();
        }
    });
    is_bare(&node, &world);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_saved_in_time_goes_on_and_is_saved_by_the_next_node() {
    let world = World::new(Handle::current());
    let bench = Bench::over(world.clone()).await;
    let id = bench.create("").await;
    bench.fakes.held.send_replace(true);
    bench.sandboxes.save().await;
    assert_eq!(bench.show(&id).await.state, State::Hibernating);
    assert_eq!(bench.sandboxes.leave().await, 1);
    assert_eq!(Place::all(world.vms()).unwrap().len(), 1);

    let bench = Bench::over(world).await;
    bench.until(&id, State::Hibernated).await;
    assert_eq!(bench.sandboxes.visit(&id, LIMIT).await.unwrap().start, StartKind::Resumed);
    bench.sandboxes.kill(&id).await.unwrap();
}

#[test]
fn one_that_does_not_answer_holds_up_nobody_but_itself() {
    let (_runtime, world) = world();
    let node = Node::start(&world);
    let all = node.run(async |bench| {
        let mut all = Vec::new();
        for _ in 0..4 {
            let id = bench.create("").await;
            all.push((bench.show(&id).await.pid.unwrap(), id));
        }
        all
    });
    let [(late, slow), (never, silent), (_, first), (_, second)] = all.try_into().unwrap();
    for pid in [late, never] {
        fake::stop(pid, true);
    }
    drop(node);
    let node = Node::begin(&world);
    node.run(async |bench| {
        for id in [&first, &second] {
            drop(bench.sandboxes.visit(id, LIMIT).await.unwrap());
        }
        // They are listed as their records say, and requests wait.
        let listed = bench.sandboxes.list(None).await;
        let states: Vec<_> = listed.iter().map(|info| info.state).collect();
        assert_eq!(states, [State::Running; 4]);
        assert_eq!(bench.show(&slow).await.pid, Some(late));
        let refused = bench.sandboxes.visit(&slow, Duration::from_millis(10)).await.err().unwrap();
        assert!(matches!(refused, SandboxError::Late { .. }), "{refused}");
        let waiting = bench.sandboxes.visit(&slow, LIMIT);
        let (visit, ()) = tokio::join!(waiting, async { fake::stop(late, false) });
        assert_eq!(visit.unwrap().start, StartKind::Running);
        assert_eq!(bench.show(&slow).await.requests, 0, "the one that had left is over");
        // Whoever ends it need not wait for it.
        bench.sandboxes.kill(&silent).await.unwrap();
        assert!(fake::born(never).is_none(), "it lives");
    });
    // One whose VM has not answered is left as it was.
    fake::stop(late, true);
    drop(node);
    let node = Node::begin(&world);
    leaves(node, 3);
    fake::stop(late, false);
    let node = Node::start(&world);
    node.run(async |bench| {
        for id in [&slow, &first, &second] {
            drop(bench.sandboxes.visit(id, LIMIT).await.unwrap());
            bench.sandboxes.kill(id).await.unwrap();
        }
    });
    is_bare(&node, &world);
}

#[tokio::test]
async fn one_that_is_being_resumed_is_saved_when_it_runs() {
    let bench = Bench::new().await;
    let id = bench.create("").await;
    within(bench.sandboxes.pause(&id, PauseTo::Disk)).await.unwrap();
    bench.fakes.held.send_replace(true);
    let mut visit = bench.sandboxes.visit(&id, LIMIT);
    assert!((&mut visit).now_or_never().is_none());
    assert_eq!(bench.show(&id).await.state, State::Resuming);
    let sandboxes = bench.sandboxes.clone();
    let saving = tokio::spawn(async move { sandboxes.save().await });
    // The spawned one is asked first, and its sandbox's task takes what it is told in turn.
    tokio::task::yield_now().await;
    bench.show(&id).await;
    bench.fakes.held.send_replace(false);
    // It is let in, or hears that it is paused: either way it leaves.
    drop(within(visit).await);
    within(saving).await.unwrap();
    let known = id.parse().unwrap();
    assert_eq!(bench.fakes.world.store.get(&known).await.unwrap().state(), State::Hibernated);
}

#[test]
fn one_that_cannot_be_ended_has_failed_and_stays_until_it_has() {
    let (_runtime, world) = world();
    let node = Node::start(&world);
    let (id, pid) = node.run(async |bench| {
        let id = bench.create("").await;
        let pid = bench.show(&id).await.pid.unwrap();
        (id, pid)
    });
    fake::stop(pid, true);
    world.endless.lock().unwrap().insert(pid);
    drop(node);
    let node = Node::begin(&world);
    node.run(async |bench| {
        let mut killing = bench.sandboxes.kill(&id);
        let failed = async {
            loop {
                let failure = bench.show(&id).await.failure;
                if let Some(why) = failure.filter(|why| why.contains("its VM may live")) {
                    return why;
                }
                tokio::task::yield_now().await;
            }
        };
        let early = tokio::select! {
            killed = &mut killing => Err(killed),
            why = within(failed) => Ok(why),
        };
        let why = early.expect("it was not ended");
        assert!(why.contains("told not to"), "{why}");
        assert!(fake::born(pid).is_some() && !Place::all(world.vms()).unwrap().is_empty());
        world.endless.lock().unwrap().clear();
        killing.await.unwrap();
        assert!(fake::born(pid).is_none(), "it lives");
    });
    is_bare(&node, &world);
}

#[test]
fn a_vm_that_two_know_of_is_counted_once() {
    let (_runtime, world) = world();
    let node = Node::start(&world);
    let pid = node.run(async |bench| bench.show(&bench.create("").await).await.pid.unwrap());
    fake::stop(pid, true);
    drop(node);
    let node = Node::begin(&world);
    // Its sandbox waits for it, and whoever has the survivors has it too.
    *node.bench.fakes.overlooked.lock().unwrap() = vec![stasis_state::Process { pid, started: 0 }];
    leaves(node, 1);
    fake::stop(pid, false);
}
