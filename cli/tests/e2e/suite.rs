//! Runs the cases of a lane, and says what was left out.

use std::{
    collections::BTreeSet,
    panic::{self, AssertUnwindSafe},
    process::ExitCode,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use libtest_mimic::{Arguments, Conclusion, Failed, Trial};

use crate::{
    cases::{self, Case, Needs},
    lane::{self, Lane},
    world::World,
};

/// A VM's kernel code costs a core where it is interpreted: more at once only makes each slower.
const THREADS: usize = 2;

/// The longest case takes a fifth of it on a loaded machine. One that hangs is given up and named, so that the others still run and
/// the run ends.
const LIMIT: Duration = Duration::from_secs(600);

pub(crate) fn run() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(THREADS);
    let cases = cases::all();
    let lane = match Lane::of_this_machine() {
        Ok(lane) => lane,
        Err(missing) => {
            println!("nothing of this suite can run here: {missing}");
            let skipped = cases.len();
            let end = libtest_mimic::run(&arguments, cases.into_iter().map(skip).collect());
            println!("{skipped} skipped: {missing}");
            return end.exit_code();
        }
    };
    if arguments.list {
        return libtest_mimic::run(&arguments, cases.into_iter().map(skip).collect()).exit_code();
    }
    let (here, bare) = (lane.has_the_host(), lane::bare().is_some());
    let lacks = |needs| match needs {
        Needs::Http => None,
        Needs::Host => (!here).then_some("the server's host"),
        Needs::Bare => (!here || !bare).then_some("the server's host and STASIS_BARE"),
    };
    let skipped: Vec<_> = cases.iter().filter_map(|case| lacks(case.needs)).collect();
    // Lives until the process ends, as the trials must.
    let shared = cases.iter().any(|case| case.needs != Needs::Bare && is_chosen(&arguments, case.name));
    let world: &'static World = Box::leak(Box::new(World::start(lane, shared)));

    let trials = cases.into_iter().map(|case| match lacks(case.needs) {
        Some(_) => skip(case),
        None => trial(case, world),
    });
    let end = libtest_mimic::run(&arguments, trials.collect());
    for missing in skipped.iter().collect::<BTreeSet<_>>() {
        println!("{} skipped: need {missing}", skipped.iter().filter(|one| *one == missing).count());
    }
    conclude(&end, world)
}

/// Whether a case runs, as far as its name says.
fn is_chosen(arguments: &Arguments, name: &str) -> bool {
    let matches = |part: &String| if arguments.exact { name == part } else { name.contains(part.as_str()) };
    arguments.filter.as_ref().is_none_or(matches) && !arguments.skip.iter().any(matches)
}

/// The last test: nothing is left.
fn conclude(end: &Conclusion, world: &World) -> ExitCode {
    let left = world.stop();
    for one in &left {
        println!("LEFT BEHIND after the end: {one}");
    }
    if left.is_empty() && world.server.is_some() {
        println!("the server has stopped and left no process, mount or loop device");
    }
    if end.has_failed() || !left.is_empty() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn trial(case: Case, world: &'static World) -> Trial {
    Trial::test(case.name, move || within(LIMIT, move || (case.run)(world)))
}

/// Runs a case in a thread of its own, which is left behind if it does not end.
fn within(limit: Duration, case: impl FnOnce() + Send + 'static) -> Result<(), Failed> {
    let (done, outcome) = mpsc::channel();
    thread::spawn(move || done.send(panic::catch_unwind(AssertUnwindSafe(case))));
    match outcome.recv_timeout(limit) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(panicked)) => panic::resume_unwind(panicked),
        Err(RecvTimeoutError::Timeout) => Err(format!("it hangs: not done within {limit:?}").into()),
        Err(RecvTimeoutError::Disconnected) => Err("its thread ended without a word".into()),
    }
}

fn skip(case: Case) -> Trial {
    Trial::test(case.name, || Ok(())).with_ignored_flag(true)
}
