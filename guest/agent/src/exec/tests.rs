use std::{
    io::Read,
    os::unix::net::UnixStream,
    path::Path,
    sync::Mutex,
    time::{Duration, Instant},
};

use stasis_guest_wire::frame;

use super::*;

/// The reaper takes any child of the process; nextest gives each test one of its own.
fn children() -> Arc<Children> {
    static CHILDREN: Mutex<Option<Arc<Children>>> = Mutex::new(None);
    let mut children = CHILDREN.lock().unwrap();
    let started = children.get_or_insert_with(|| {
        let children = Arc::new(Children::default());
        children.spawn_function(&mut Command::new("/bin/true"), |_| {}).unwrap();
        children
    });
    Arc::clone(started)
}

/// Runs `line` in a shell, as this user.
fn run(line: &str, input: &str) -> (Running, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let mut command = Command::new("/bin/sh");
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    command.args(["-c", line]);
    (Running::spawn(command, &children(), input, Place::take(&count).unwrap()).unwrap(), count)
}

fn next(node: &mut UnixStream) -> Part {
    node.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut header = [0; 4];
    node.read_exact(&mut header).unwrap();
    let mut body = vec![0; frame::body_length(header).unwrap()];
    node.read_exact(&mut body).unwrap();
    Part::decode(&body).unwrap()
}

/// All that it wrote to both, and how it ended.
fn all(line: &str, input: &str) -> (String, String, Part) {
    let (mut node, agent) = UnixStream::pair().unwrap();
    let (running, count) = run(line, input);
    running.tell(agent.into());
    let (mut out, mut err) = (Vec::new(), Vec::new());
    loop {
        match next(&mut node) {
            Part::Stdout(bytes) => out.extend(bytes),
            Part::Stderr(bytes) => err.extend(bytes),
            end => {
                // Its place is free when its thread has ended, which closes the connection.
                assert_eq!(node.read(&mut [0; 8]).unwrap(), 0);
                until(|| count.load(Ordering::SeqCst) == 0);
                return (String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap(), end);
            }
        }
    }
}

/// Waits for what no event tells of.
fn until(is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it never came to that");
        thread::yield_now();
    }
}

#[test]
fn what_it_writes_and_how_it_ends_is_told() {
    assert_eq!(all("echo out; echo err >&2; exit 3", ""), ("out\n".into(), "err\n".into(), Part::Exited(3)));
    assert_eq!(all("kill -TERM $$", ""), (String::new(), String::new(), Part::Killed(15)));
    let (out, _, end) = all("seq 1 100000", "");
    assert_eq!((out.lines().count(), out.lines().last(), end), (100_000, Some("100000"), Part::Exited(0)));
}

#[test]
fn its_input_ends_and_may_be_more_than_it_reads() {
    let long = "x".repeat(300_000);
    assert_eq!(all("wc -c", &long), ("300000\n".into(), String::new(), Part::Exited(0)));
    assert_eq!(all("exit 0", &long).2, Part::Exited(0));
    assert_eq!(all("cat", "").0, "", "without any it is empty");
}

#[test]
fn what_it_leaves_in_the_background_is_not_waited_for() {
    let left = all("sleep 600 & echo $!", "").0;
    let left = Pid::from_raw(left.trim().parse().unwrap());
    nix::sys::signal::kill(left, Signal::SIGKILL).expect("it goes on");
}

#[test]
fn when_the_node_hangs_up_all_of_it_is_killed() {
    let (mut node, agent) = UnixStream::pair().unwrap();
    let (running, count) = run("sleep 600 & echo $!; wait", "");
    running.tell(agent.into());
    let Part::Stdout(pid) = next(&mut node) else { panic!("no output") };
    let child = String::from_utf8(pid).unwrap();
    drop(node);
    until(|| count.load(Ordering::SeqCst) == 0);
    // An orphan of the test's process is reaped by whoever is its PID 1, perhaps later.
    let stat = format!("/proc/{}/stat", child.trim());
    until(|| !Path::new(&stat).exists() || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") Z ")));
}

#[test]
fn there_are_only_so_many_places() {
    let count = Arc::new(AtomicUsize::new(0));
    let places: Vec<_> = (0..MOST).map(|_| Place::take(&count).unwrap()).collect();
    assert!(Place::take(&count).is_none());
    drop(places);
    assert!(Place::take(&count).is_some());
}
