//! A process that is killed in the midst of its writes.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io::{BufRead as _, BufReader, Write as _},
    path::PathBuf,
    process::{Command, Stdio},
    sync::{Arc, mpsc},
    thread,
};

use futures_util::future::try_join_all;
use stasis_state::{Query, SqliteStore, Store, Timestamp};

use crate::{LIMIT, records, run};

/// Set in the process that is to be killed: where its store is.
const FOLDER: &str = "STASIS_TEST_CRASH_FOLDER";
const TASKS: usize = 8;

/// Not a test by itself: [`nothing_acknowledged_is_lost`] starts this very program again with the variable, and kills it.
#[test]
fn the_writer_that_is_killed() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    run(write_until_killed(folder));
}

async fn write_until_killed(folder: OsString) {
    let store = Arc::new(SqliteStore::open(&PathBuf::from(folder).join("state.db")).unwrap());
    let life = std::process::id();
    let writers = (0..TASKS).map(|task| tokio::spawn(write(Arc::clone(&store), format!("w{life}-{task}"))));
    try_join_all(writers).await.unwrap();
}

async fn write(store: Arc<SqliteStore>, id: String) {
    let mut record = records::record(&id, "acme");
    store.create(record.clone()).await.unwrap();
    loop {
        // One write to the pipe per line, so that no two are mixed.
        let line = format!("acked {id} {}\n", record.generation());
        std::io::stdout().lock().write_all(line.as_bytes()).unwrap();
        record = store.commit(record.edit(Timestamp::now())).await.unwrap();
    }
}

#[test]
fn nothing_acknowledged_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let mut acked: BTreeMap<String, u64> = BTreeMap::new();
    for round in 0..5 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "crash::the_writer_that_is_killed", "--nocapture", "--test-threads=1"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let (tell, told) = mpsc::channel();
        let reader = thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    break;
                }
            }
        });
        // Killed after another number of writes each time; whatever it has acknowledged until it is dead counts.
        let mut count = 0;
        let most = 200 + round * 77;
        while count < most {
            let line = told.recv_timeout(LIMIT).expect("the writer writes nothing");
            count += usize::from(note(&line, &mut acked));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        reader.join().unwrap();
        told.try_iter().for_each(|line| {
            note(&line, &mut acked);
        });
        let file = folder.path().join("state.db");
        let store = SqliteStore::open(&file).unwrap();
        run(check(&store, &acked));
        drop(store);
    }
    assert_eq!(acked.len(), 5 * TASKS);
}

fn note(line: &str, acked: &mut BTreeMap<String, u64>) -> bool {
    // The test harness writes to the same pipe, in front of the first line too.
    let Some((_, told)) = line.split_once("acked ") else { return false };
    let Some((id, generation)) = told.split_once(' ') else { return false };
    let Ok(generation) = generation.parse() else { return false };
    let last = acked.entry(id.to_owned()).or_default();
    assert!(generation > *last, "{id} went back from {last} to {generation}");
    *last = generation;
    true
}

async fn check(store: &SqliteStore, acked: &BTreeMap<String, u64>) {
    let page = store.list(Query { limit: 10_000, ..Query::default() }).await.unwrap();
    assert_eq!(page.damaged, [], "half a record");
    let kept: BTreeMap<_, _> =
        page.records.iter().map(|record| (record.id().to_string(), record.generation())).collect();
    for (id, generation) in acked {
        let found = kept.get(id).copied().unwrap_or(0);
        assert!(found >= *generation, "{id}: acknowledged {generation}, kept {found}");
        // Each task has one write under way at most.
        assert!(found <= generation + 1, "{id}: acknowledged {generation}, kept {found}");
    }
}
