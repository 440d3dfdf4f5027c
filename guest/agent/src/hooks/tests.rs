use std::{
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    time::Duration,
};

use super::*;

fn hooks() -> (Arc<Hooks>, PathBuf, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hooks");
    (Arc::new(Hooks::listen(&path).unwrap()), path, directory)
}

/// A runtime that answers each reseed line with what `answer` makes of its generation, and collects the seeds.
fn runtime(path: &Path, answer: fn(&str) -> String) -> thread::JoinHandle<Vec<String>> {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.write_all(b"test 1\n").unwrap();
    thread::spawn(move || {
        let mut seeds = Vec::new();
        for line in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!(words[0], "reseed");
            seeds.push(words[2].to_owned());
            let _ = stream.write_all(answer(words[1]).as_bytes());
        }
        seeds
    })
}

fn ok(generation: &str) -> String {
    format!("ok {generation}\n")
}

fn seeds() -> impl FnMut() -> io::Result<[u8; SEED]> {
    let mut next = 0;
    move || {
        next += 1;
        Ok([next; SEED])
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(100)
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

#[test]
fn every_runtime_gets_its_own_seed_each_time() {
    let (hooks, path, _directory) = hooks();
    assert_eq!(hooks.reseed(1, later(), seeds()).unwrap(), 0);
    // Not accepted by anybody yet, as right before a snapshot.
    let runtimes = [runtime(&path, ok), runtime(&path, ok)];
    assert_eq!(hooks.reseed(2, later(), seeds()).unwrap(), 2);
    assert_eq!(hooks.reseed(3, later(), seeds()).unwrap(), 2);
    drop(hooks);
    let seen = runtimes.map(|runtime| runtime.join().unwrap());
    assert_eq!(seen.each_ref().map(Vec::len), [2, 2]);
    // Who is asked first the second time depends on who answered first.
    for time in 0..2 {
        let mut seeds = seen.each_ref().map(|seeds| &seeds[time]);
        seeds.sort();
        assert_eq!(seeds.map(String::as_str), ["01".repeat(64), "02".repeat(64)]);
    }
}

#[test]
fn one_that_does_not_answer_fails_the_repair() {
    let (hooks, path, _directory) = hooks();
    let _good = runtime(&path, ok);
    // An answer for an earlier life is none.
    let _stale = runtime(&path, |_| "ok 6\n".into());
    let error = hooks.reseed(7, soon(), seeds()).unwrap_err();
    assert_eq!(error.to_string(), "runtime \"test 1\" did not answer in time");
}

#[test]
fn one_that_hung_up_does_not_count() {
    let (hooks, path, _directory) = hooks();
    drop(UnixStream::connect(&path).unwrap());
    let _good = runtime(&path, ok);
    assert_eq!(hooks.reseed(1, later(), seeds()).unwrap(), 1);
}

#[test]
fn one_that_hangs_up_when_asked_does_not_count() {
    let (hooks, path, _directory) = hooks();
    let stream = UnixStream::connect(&path).unwrap();
    thread::spawn(move || BufReader::new(stream).read_line(&mut String::new()).unwrap());
    assert_eq!(hooks.reseed(1, later(), seeds()).unwrap(), 0);
}

#[test]
fn one_that_babbles_fails_the_repair() {
    let (hooks, path, _directory) = hooks();
    let _babbler = runtime(&path, |_| "x".repeat(100_000));
    assert!(matches!(hooks.reseed(1, later(), seeds()), Err(HookError::Garbled { .. })));
}

#[test]
fn the_dead_are_forgotten_in_the_background() {
    let (hooks, path, _directory) = hooks();
    hooks.accept_in_background().unwrap();
    for _ in 0..(3 * MOST) {
        drop(UnixStream::connect(&path).unwrap());
    }
    let _good = runtime(&path, ok);
    assert_eq!(hooks.reseed(1, later(), seeds()).unwrap(), 1);
}

#[test]
fn without_seeds_there_is_no_repair() {
    let (hooks, path, _directory) = hooks();
    let _runtime = runtime(&path, ok);
    let error = hooks.reseed(1, later(), || Err(io::Error::other("dry"))).unwrap_err();
    assert!(matches!(error, HookError::Seeds(_)));
}
