//! Records that cannot be read: nothing of their sandboxes is touched until somebody deletes them.

use rusqlite::Connection;
use stasis_state::{Process, SqliteStore};

use super::{
    adopting::{Node, is_bare, world},
    *,
};

#[test]
fn what_lives_or_is_saved_outlives_a_record_that_cannot_be_read_and_goes_when_it_is_deleted() {
    let (_runtime, world) = world();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("records.sqlite");
    let open = || Node::storing_in(&world, Arc::new(SqliteStore::open(&file).unwrap()));
    let node = open();
    let [runs, sleeps, saved, whole] = node.run(async |bench| {
        let all = [bench.create("").await, bench.create("").await, bench.create("").await, bench.create("").await];
        bench.sandboxes.pause(&all[1], PauseTo::Ram).await.unwrap();
        bench.sandboxes.pause(&all[2], PauseTo::Disk).await.unwrap();
        [bench.show(&all[0]).await, bench.show(&all[1]).await, bench.show(&all[2]).await, bench.show(&all[3]).await]
    });
    drop(node);
    let damage = |how: &str, id: &SandboxId| {
        let by_hand = Connection::open(&file).unwrap();
        assert_eq!(by_hand.execute(&format!("UPDATE sandbox SET record = {how} WHERE id = '{id}'"), []).unwrap(), 1);
    };
    damage("replace(record, '\"generation\":', '\"generatiom\":')", &runs.id);
    damage("replace(record, '\"generation\":', '\"generatiom\":')", &saved.id);
    let [running, asleep] = [runs.pid.unwrap(), sleeps.pid.unwrap()];
    // One that no record names goes; one that a damaged record names stays.
    let node = open();
    let stray = node.run(async |bench| {
        let stray = bench.fakes.keep(bench.fakes.machine().await.unwrap()).await.unwrap();
        let pid = stray.vmm.pid();
        std::mem::forget(stray);
        pid
    });
    drop(node);
    let node = open();
    node.run(async |_| {
        while fake::born(stray).is_some() {
            tokio::task::yield_now().await;
        }
    });
    assert!(fake::born(running).is_some(), "it was ended");
    drop(node);
    damage("substr(record, 1, 40)", &sleeps.id);

    let node = open();
    node.run(async |bench| {
        drop(bench.sandboxes.visit(whole.id.as_str(), LIMIT).await.unwrap());
        for (damaged, pid) in [(&runs, Some(running)), (&sleeps, None), (&saved, None)] {
            let id = damaged.id.as_str();
            let shown = bench.show(id).await;
            assert_eq!((shown.state, shown.pid), (State::Failed, pid));
            assert!(shown.failure.unwrap().contains("its record cannot be read"));
            let refused = bench.sandboxes.visit(id, LIMIT).await.err().unwrap();
            assert!(matches!(refused, SandboxError::State { state: State::Failed, .. }), "{refused}");
            assert!(bench.sandboxes.resume(id, None).await.is_err());
        }
        assert_eq!(bench.show(runs.id.as_str()).await.template.as_str(), "x");
        assert_eq!(bench.sandboxes.list(Some(State::Failed)).await.len(), 3);
        assert!(fake::born(running).is_some() && fake::born(asleep).is_some(), "one was ended");
        assert!(world.saved.lock().unwrap().contains(&saved.id), "what was saved is gone");

        for damaged in [&runs, &saved, &sleeps] {
            bench.sandboxes.kill(damaged.id.as_str()).await.unwrap();
            assert!(matches!(bench.sandboxes.inspect(damaged.id.as_str()).await, Err(SandboxError::Unknown { .. })));
        }
        assert!(fake::born(running).is_none(), "it lives");
        assert!(world.saved.lock().unwrap().is_empty());
        assert!(fake::born(asleep).is_none(), "no record is left that could name it, and it lives");
        drop(bench.sandboxes.visit(whole.id.as_str(), LIMIT).await.expect("it is whole, and was ended"));
        bench.sandboxes.kill(whole.id.as_str()).await.unwrap();
    });
    is_bare(&node, &world);
    drop(node);
    is_bare(&open(), &world);
}

#[test]
fn a_record_that_says_no_longer_whose_it_is_is_discarded_by_the_next_node_and_its_vm_ends() {
    let (_runtime, world) = world();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("records.sqlite");
    let open = || Node::storing_in(&world, Arc::new(SqliteStore::open(&file).unwrap()));
    let node = open();
    let [nameless, lordless, renamed, whole] = node.run(async |bench| {
        let mut all = Vec::new();
        for _ in 0..4 {
            let id = bench.create("").await;
            all.push(bench.show(&id).await);
        }
        all.try_into().unwrap()
    });
    drop(node);
    let by_hand = Connection::open(&file).unwrap();
    // Of one its VM's name is lost too.
    for (of, damage) in [
        (&nameless, "id = '/?', record = 'x'"),
        // What the columns have lost, their records still say.
        (&lordless, "tenant = ''"),
        (&renamed, "id = '?'"),
    ] {
        assert_eq!(by_hand.execute(&format!("UPDATE sandbox SET {damage} WHERE id = '{}'", of.id), []).unwrap(), 1);
    }
    let node = open();
    node.run(async |bench| {
        for kept in [&lordless, &renamed] {
            assert!(fake::born(kept.pid.unwrap()).is_some(), "it was ended unasked");
            assert_eq!(bench.show(kept.id.as_str()).await.state, State::Failed);
            bench.sandboxes.kill(kept.id.as_str()).await.unwrap();
            assert!(fake::born(kept.pid.unwrap()).is_none(), "it lives");
        }
        while fake::born(nameless.pid.unwrap()).is_some() {
            tokio::task::yield_now().await;
        }
        drop(bench.sandboxes.visit(whole.id.as_str(), LIMIT).await.unwrap());
        bench.sandboxes.kill(whole.id.as_str()).await.unwrap();
    });
    let left: u32 = by_hand.query_row("SELECT count(*) FROM sandbox", [], |row| row.get(0)).unwrap();
    assert_eq!(left, 0, "a record is left that nobody can delete");
    is_bare(&node, &world);
}

/// Has the record of a sandbox name another's VM.
fn name_another(world: &World, of: &SandboxId, pid: u32) {
    let renamed = async {
        let mut change = world.store.get(of).await.unwrap().edit(stasis_pool_api::Timestamp::now());
        change.facts().owner.as_mut().unwrap().process = Some(Process { pid, started: 0 });
        world.store.commit(change).await.unwrap();
    };
    renamed.now_or_never().unwrap();
}

#[test]
fn a_vm_that_cannot_be_taken_over_or_that_two_records_name_is_left_until_its_sandbox_is_deleted() {
    let (_runtime, world) = world();
    let node = Node::start(&world);
    let [faulty, first, second] = node.run(async |bench| {
        let all = [bench.create("").await, bench.create("").await, bench.create("").await];
        [bench.show(&all[0]).await, bench.show(&all[1]).await, bench.show(&all[2]).await]
    });
    drop(node);
    let [bad, named] = [faulty.pid.unwrap(), first.pid.unwrap()];
    world.faulty.lock().unwrap().insert(bad);
    name_another(&world, &second.id, named);

    let node = Node::start(&world);
    node.run(async |bench| {
        for (one, pid, why) in
            [(&faulty, bad, "told to"), (&first, named, "another record"), (&second, named, "another record")]
        {
            let shown = bench.show(one.id.as_str()).await;
            assert_eq!((shown.state, shown.pid), (State::Failed, Some(pid)));
            assert!(shown.failure.unwrap().contains(why));
            assert!(bench.sandboxes.visit(one.id.as_str(), LIMIT).await.is_err());
        }
        assert!(fake::born(bad).is_some() && fake::born(named).is_some(), "one was ended");
        bench.sandboxes.kill(faulty.id.as_str()).await.unwrap();
        assert!(fake::born(bad).is_none(), "it lives");
        bench.sandboxes.kill(second.id.as_str()).await.unwrap();
        assert!(fake::born(named).is_some(), "it is the other's");
        // No record names this one.
        while fake::born(second.pid.unwrap()).is_some() {
            tokio::task::yield_now().await;
        }
        bench.sandboxes.kill(first.id.as_str()).await.unwrap();
        assert!(fake::born(named).is_none(), "no record is left that names it, and it lives");
    });
    is_bare(&node, &world);
}

#[test]
fn a_vm_that_two_records_named_is_that_one_s_which_the_next_node_finds_alone() {
    let (_runtime, world) = world();
    let node = Node::start(&world);
    let [first, second] = node.run(async |bench| {
        let all = [bench.create("").await, bench.create("").await];
        [bench.show(&all[0]).await, bench.show(&all[1]).await]
    });
    drop(node);
    name_another(&world, &second.id, first.pid.unwrap());
    let node = Node::start(&world);
    node.run(async |bench| bench.sandboxes.kill(second.id.as_str()).await).unwrap();
    drop(node);
    let node = Node::start(&world);
    node.run(async |bench| {
        drop(bench.sandboxes.visit(first.id.as_str(), LIMIT).await.unwrap());
        assert_eq!(bench.sandboxes.list(None).await.len(), 1);
        bench.sandboxes.kill(first.id.as_str()).await.unwrap();
    });
    is_bare(&node, &world);
}

#[test]
fn a_vm_that_two_records_name_ends_with_the_last_of_them() {
    let (_runtime, world) = world();
    let node = Node::start(&world);
    let all = node.run(async |bench| {
        let all = [bench.create("").await, bench.create("").await, bench.create("").await];
        [bench.show(&all[0]).await, bench.show(&all[1]).await, bench.show(&all[2]).await]
    });
    drop(node);
    let named = all[0].pid.unwrap();
    for other in &all[1..] {
        let mut change =
            world.store.get(&other.id).now_or_never().unwrap().unwrap().edit(stasis_pool_api::Timestamp::now());
        change.facts().owner.as_mut().unwrap().process = Some(Process { pid: named, started: 0 });
        world.store.commit(change).now_or_never().unwrap().unwrap();
    }
    let node = Node::start(&world);
    node.run(async |bench| {
        // Two at once: one of them is the last but one.
        let (first, second) =
            tokio::join!(bench.sandboxes.kill(all[0].id.as_str()), bench.sandboxes.kill(all[1].id.as_str()),);
        first.unwrap();
        second.unwrap();
        assert!(fake::born(named).is_some(), "it is the third's");
        world.endless.lock().unwrap().insert(named);
        let refused = bench.sandboxes.kill(all[2].id.as_str()).await.unwrap_err().to_string();
        assert!(refused.contains("its VM may live"), "{refused}");
        assert_eq!(bench.show(all[2].id.as_str()).await.state, State::Failed);
        world.endless.lock().unwrap().clear();
        bench.sandboxes.kill(all[2].id.as_str()).await.unwrap();
        assert!(fake::born(named).is_none(), "it lives");
    });
    is_bare(&node, &world);
}
