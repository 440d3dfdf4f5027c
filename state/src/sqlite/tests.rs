use futures_util::FutureExt as _;
use rusqlite::Connection;

use super::{read::DUE, *};
use crate::{Event, Named, record::tests::sample};

/// Waits for a future of this crate: it needs no runtime, only its threads. At most a minute.
fn wait<T>(future: impl Future<Output = T>) -> T {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let mut future = std::pin::pin!(future);
    loop {
        if let Some(value) = future.as_mut().now_or_never() {
            return value;
        }
        assert!(std::time::Instant::now() < end, "the store did not answer within a minute");
        std::thread::yield_now();
    }
}

#[test]
fn a_store_of_a_newer_build_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("s.db");
    drop(SqliteStore::open(&file).unwrap());
    Connection::open(&file).unwrap().execute_batch("PRAGMA user_version = 99").unwrap();
    let refused = SqliteStore::open(&file).unwrap_err();
    assert!(matches!(refused, OpenError::Newer { found: 99, .. }));
    assert!(refused.to_string().ends_with("has schema 99, and this build knows up to 1: use the newer build"));
    let version: i64 = Connection::open(&file).unwrap().query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap();
    assert_eq!(version, 99);
}

#[test]
fn what_is_not_a_store_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.db");
    Connection::open(&other).unwrap().execute_batch("CREATE TABLE t (x)").unwrap();
    assert!(matches!(SqliteStore::open(&other), Err(OpenError::Foreign { .. })));
    let text = folder.path().join("text.db");
    std::fs::write(&text, "not a database, and longer than the header of one would be: ".repeat(40)).unwrap();
    assert!(matches!(SqliteStore::open(&text), Err(OpenError::File { .. })));
    assert!(matches!(SqliteStore::open(&folder.path().join("no/such.db")), Err(OpenError::File { .. })));
}

#[test]
fn a_damaged_record_is_named_can_be_discarded_and_harms_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("s.db");
    let store = SqliteStore::open(&file).unwrap();
    for id in ["a", "b", "c", "d", "e"] {
        wait(store.create(sample(id))).unwrap();
    }
    let by_hand = Connection::open(&file).unwrap();
    by_hand.execute_batch("UPDATE sandbox SET record = substr(record, 1, 40) WHERE id = 'b'").unwrap();
    by_hand.execute_batch("UPDATE sandbox SET generation = 7 WHERE id = 'd'").unwrap();
    by_hand.execute_batch("UPDATE sandbox SET record = CAST(x'80ff' AS TEXT) WHERE id = 'e'").unwrap();
    let page = wait(store.list(Query { limit: 10, ..Query::default() })).unwrap();
    let ids = |page: &Page| page.records.iter().map(|record| record.id().to_string()).collect::<Vec<_>>();
    assert_eq!(ids(&page), ["a", "c"]);
    assert_eq!(page.damaged.iter().map(|damaged| damaged.id.as_str()).collect::<Vec<_>>(), ["b", "d", "e"]);
    assert_eq!(
        page.damaged.iter().map(|damaged| damaged.process).collect::<Vec<_>>(),
        [Named::Unknown, Named::Nothing, Named::Unknown]
    );
    assert!(page.damaged.iter().all(|damaged| damaged.tenant == sample("a").tenant().as_str()));
    let paged = wait(store.list(Query { limit: 2, ..Query::default() })).unwrap();
    assert_eq!((ids(&paged), paged.next), (vec!["a".to_owned()], Some("b".parse().unwrap())));
    let refused = wait(store.get(&"b".parse().unwrap())).unwrap_err();
    assert!(matches!(&refused, StoreError::Corrupt { id, .. } if id == "b"), "{refused}");
    assert!(matches!(wait(store.discard("a")), Err(StoreError::Conflict { .. })));
    assert!(wait(store.discard("b")).unwrap());
    assert!(wait(store.discard("d")).unwrap());
    assert!(wait(store.discard("e")).unwrap());
    assert!(!wait(store.discard("b")).unwrap());
    let change = sample("a").on(Event::Started, Timestamp::from_ms(5)).unwrap();
    assert_eq!(wait(store.commit(change)).unwrap().generation(), 2);
}

#[test]
fn what_is_due_is_read_from_the_index() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("s.db");
    drop(SqliteStore::open(&file).unwrap());
    let plan: String = Connection::open(&file)
        .unwrap()
        .query_row(&format!("EXPLAIN QUERY PLAN SELECT record FROM sandbox {DUE}"), [1, 1], |row| row.get(3))
        .unwrap();
    assert!(plan.starts_with("SEARCH sandbox USING INDEX sandbox_by_due"), "{plan}");
}
