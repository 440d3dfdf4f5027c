//! What every store must keep, written once and run against each of them; and what only one that outlives its process can show.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "that is how tests fail"
)]

mod crash;
mod full;
mod records;
mod suite;

use std::{path::Path, sync::Arc, time::Duration};

use stasis_state::{MemoryStore, SqliteStore, Store};

/// A test that hangs fails after this.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs a test on a runtime, with the limit.
fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(LIMIT, test).await.expect("the test hangs") });
}

/// One module per store, one test per promise: a new store is a line here.
macro_rules! stores {
    ($($store:ident: $open:expr;)+) => {
        $(mod $store {
            use super::*;
            stores!(@promises $open;
                what_was_made_is_read_back
                a_name_is_given_once
                lists_are_paged_and_filtered
                a_stale_change_is_refused_with_what_is_there
                half_a_record_is_refused
                one_of_a_hundred_writers_wins_each_generation
                what_is_due_comes_in_order
                a_gone_one_leaves_nothing
                kill_succeeds_from_every_state_and_twice
                kill_wins_against_writers
                notices_tell_every_change_in_order
                measuring_leaves_nothing_behind
            );
        })+
    };
    (@promises $open:expr; $($promise:ident)+) => {
        $(#[test]
        fn $promise() {
            let folder = tempfile::tempdir().unwrap();
            let open: fn(&Path) -> Arc<dyn Store> = $open;
            run(suite::$promise(open(folder.path())));
        })+
    };
}

stores! {
    memory: |_| Arc::new(MemoryStore::default());
    sqlite: |folder| Arc::new(SqliteStore::open(&folder.join("state.db")).unwrap());
}
