//! The promises.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use stasis_state::{Event, Query, SandboxId, State, Store, StoreError, Timestamp, begin_kill, bench::cas_per_s};

use crate::records::{at, made, record, step};

type Shared = Arc<dyn Store>;

pub(crate) async fn what_was_made_is_read_back(store: Shared) {
    let made = made(&*store, "a", "acme", State::Hibernated).await;
    assert_eq!(store.get(made.id()).await.unwrap(), made);
    let missing: SandboxId = "b".parse().unwrap();
    assert!(matches!(store.get(&missing).await, Err(StoreError::NotFound { id }) if id == missing));
}

pub(crate) async fn a_name_is_given_once(store: Shared) {
    store.create(record("a", "acme")).await.unwrap();
    let refused = store.create(record("a", "other")).await.unwrap_err();
    assert!(matches!(refused, StoreError::Exists { .. }));
    assert_eq!(store.get(&"a".parse().unwrap()).await.unwrap().tenant().as_str(), "acme");
}

pub(crate) async fn lists_are_paged_and_filtered(store: Shared) {
    for n in 0..10 {
        let tenant = if n % 2 == 0 { "even" } else { "odd" };
        let state = if n < 4 { State::Running } else { State::Suspended };
        made(&*store, &format!("s{n}"), tenant, state).await;
    }
    let mut query = Query { limit: 3, ..Query::default() };
    let mut seen = Vec::new();
    loop {
        let page = store.list(query.clone()).await.unwrap();
        assert!(page.records.len() <= 3);
        seen.extend(page.records.iter().map(|record| record.id().to_string()));
        let Some(next) = page.next else { break };
        query.after = Some(next);
    }
    assert_eq!(seen, (0..10).map(|n| format!("s{n}")).collect::<Vec<_>>());
    let query = Query {
        tenant: Some("even".parse().unwrap()),
        states: vec![State::Running, State::Hibernated],
        limit: 100,
        ..Query::default()
    };
    let page = store.list(query).await.unwrap();
    let ids: Vec<_> = page.records.iter().map(|record| record.id().as_str()).collect();
    assert_eq!((ids, page.next), (vec!["s0", "s2"], None));
}

pub(crate) async fn a_stale_change_is_refused_with_what_is_there(store: Shared) {
    let old = made(&*store, "a", "acme", State::Running).await;
    let new = step(&*store, &old, Event::PauseBegun, at(3_000)).await;
    let refused = store.commit(old.edit(at(4_000))).await.unwrap_err();
    assert!(matches!(&refused, StoreError::Conflict { present, .. } if *present == new.stamp()));
    assert_eq!(
        refused.to_string(),
        "sandbox a has changed meanwhile: it is pausing, generation 3; read it and decide again"
    );
    assert_eq!(store.get(new.id()).await.unwrap(), new);
    let unknown = record("b", "acme").on(Event::Started, at(1)).unwrap();
    assert!(matches!(store.commit(unknown).await, Err(StoreError::NotFound { .. })));
}

pub(crate) async fn half_a_record_is_refused(store: Shared) {
    let hibernating = made(&*store, "a", "acme", State::Hibernating).await;
    let half = hibernating.on(Event::Hibernated, at(3_000)).unwrap();
    assert!(matches!(store.commit(half).await, Err(StoreError::Incomplete { .. })));
    assert_eq!(store.get(hibernating.id()).await.unwrap(), hibernating);
}

pub(crate) async fn one_of_a_hundred_writers_wins_each_generation(store: Shared) {
    const ROUNDS: u64 = 20;
    let first = made(&*store, "a", "acme", State::Running).await;
    let from = first.generation();
    let end = from + ROUNDS;
    let writers: Vec<_> = (0..100)
        .map(|_| {
            let (store, mut record) = (Arc::clone(&store), first.clone());
            tokio::spawn(async move {
                let mut won = Vec::new();
                while record.generation() < end {
                    // Some stores answer at once: the limit's timer must get its turn whatever they answer.
                    tokio::task::yield_now().await;
                    match store.commit(record.edit(Timestamp::now())).await {
                        Ok(next) => {
                            won.push(next.generation());
                            record = next;
                        }
                        Err(StoreError::Conflict { present, .. }) => {
                            assert!(present.generation > record.generation(), "refused without a reason");
                            record = store.get(record.id()).await.unwrap();
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                won
            })
        })
        .collect();
    let mut winners = BTreeMap::new();
    for writer in writers {
        for generation in writer.await.unwrap() {
            *winners.entry(generation).or_insert(0) += 1;
        }
    }
    let each_once: BTreeMap<_, _> = (from + 1..=end).map(|generation| (generation, 1)).collect();
    assert_eq!(winners, each_once);
}

pub(crate) async fn what_is_due_comes_in_order(store: Shared) {
    assert_eq!(store.next_due().await.unwrap(), None);
    let mut running = Vec::new();
    for (id, started) in [("a", 3_000), ("b", 1_000), ("c", 2_000)] {
        let made = made(&*store, id, "acme", State::Creating).await;
        running.push(step(&*store, &made, Event::Started, at(started)).await);
    }
    assert_eq!(store.next_due().await.unwrap(), Some(at(301_000)));
    let ids = |page: stasis_state::Page| page.records.iter().map(|r| r.id().to_string()).collect::<Vec<_>>();
    assert_eq!(ids(store.due(at(302_000), 10).await.unwrap()), ["b", "c"]);
    assert_eq!(ids(store.due(at(303_000), 2).await.unwrap()), ["b", "c"]);
    assert_eq!(ids(store.due(at(300_999), 10).await.unwrap()), Vec::<String>::new());
    // Another state, another time.
    let pausing = step(&*store, &running[1], Event::PauseBegun, at(10_000)).await;
    assert_eq!(store.next_due().await.unwrap(), Some(at(302_000)));
    step(&*store, &pausing, Event::Paused, at(10_000)).await;
    assert_eq!(ids(store.due(at(900_000), 10).await.unwrap()), ["c", "a", "b"]);
}

pub(crate) async fn a_gone_one_leaves_nothing(store: Shared) {
    let gone = made(&*store, "a", "acme", State::Gone).await;
    assert!(matches!(store.get(gone.id()).await, Err(StoreError::NotFound { .. })));
    assert_eq!(store.list(Query { limit: 10, ..Query::default() }).await.unwrap().records, []);
    assert_eq!(store.next_due().await.unwrap(), None);
    assert!(!store.discard("a").await.unwrap());
}

pub(crate) async fn kill_succeeds_from_every_state_and_twice(store: Shared) {
    for state in State::ALL {
        let id = format!("s-{state}");
        let made = made(&*store, &id, "acme", *state).await;
        for _ in 0..2 {
            let killed = begin_kill(&*store, made.id()).await.unwrap();
            match state {
                State::Gone => assert_eq!(killed, None),
                _ => assert_eq!(killed.unwrap().state(), State::Killing, "{state}"),
            }
        }
    }
}

pub(crate) async fn kill_wins_against_writers(store: Shared) {
    let first = made(&*store, "a", "acme", State::Running).await;
    let writers: Vec<_> = (0..20)
        .map(|_| {
            let (store, mut record) = (Arc::clone(&store), first.clone());
            tokio::spawn(async move {
                while record.state() != State::Killing {
                    tokio::task::yield_now().await;
                    record = match store.commit(record.edit(Timestamp::now())).await {
                        Ok(next) => next,
                        Err(StoreError::Conflict { .. }) => store.get(record.id()).await.unwrap(),
                        Err(error) => panic!("{error}"),
                    };
                }
            })
        })
        .collect();
    assert_eq!(begin_kill(&*store, first.id()).await.unwrap().unwrap().state(), State::Killing);
    for writer in writers {
        writer.await.unwrap();
    }
}

pub(crate) async fn notices_tell_every_change_in_order(store: Shared) {
    let mut notices = store.notices();
    let record = made(&*store, "a", "acme", State::Suspended).await;
    assert!(store.commit(record.edit(at(1))).await.is_ok());
    assert!(store.commit(record.edit(at(1))).await.is_err());
    begin_kill(&*store, record.id()).await.unwrap();
    let mut told = Vec::new();
    for _ in 0..6 {
        let notice = notices.recv().await.unwrap();
        told.push((notice.stamp.state, notice.stamp.generation));
    }
    use State as S;
    let states = [S::Creating, S::Running, S::Pausing, S::Suspended, S::Suspended, S::Killing];
    assert_eq!(told, states.into_iter().zip(1..).collect::<Vec<_>>());
    assert!(notices.try_recv().is_err(), "a refused change is no change");
}

pub(crate) async fn measuring_leaves_nothing_behind(store: Shared) {
    for writers in [1, 16, 64] {
        let rate = cas_per_s(&*store, writers, Duration::from_millis(300)).await.unwrap();
        println!("store.cas_per_s, {writers} writers: {rate:.0}");
        assert!(rate > 0.0);
    }
    let page = store.list(Query { limit: 10, ..Query::default() }).await.unwrap();
    assert_eq!((page.records, page.next), (vec![], None));
}
