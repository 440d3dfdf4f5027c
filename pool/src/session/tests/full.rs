//! Sandboxes of a node that is full.

use super::*;
use crate::session::{machine::MachineError, saved::SaveError};

const MIB: u64 = 1 << 20;

impl Bench {
    fn returning(&self) -> u64 {
        self.fakes.admission.capacity().0.returning
    }

    async fn until_waited_for(&self) {
        let somebody_waits = async {
            while self.fakes.admission.capacity().0.waited_for == 0 {
                tokio::task::yield_now().await;
            }
        };
        within(somebody_waits).await;
    }
}

fn refusal<T: std::fmt::Debug>(asked: Result<T, SandboxError>) -> (Resource, Duration) {
    match asked {
        Err(SandboxError::NoCapacity { full, retry_after, .. }) => (full.resource, retry_after),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_request_to_one_on_disk_that_cannot_be_started_in_time_is_told_when_to_come_again() {
    let bench = Bench::new().await;
    let id = bench.create("").await;
    within(bench.sandboxes.pause(&id, PauseTo::Disk)).await.unwrap();
    bench.fakes.is_full.store(true, SeqCst);
    let budget = Duration::from_secs(50);
    let visits = within(join_all((0..8).map(|_| bench.sandboxes.visit(&id, budget)))).await;
    for visit in visits {
        assert_eq!(refusal(visit), (Resource::Starts, Duration::from_secs(3)));
    }
    assert!(bench.fakes.patience.lock().unwrap().is_some_and(|patience| patience <= budget), "not theirs");
    bench.until(&id, State::Hibernated).await;
    bench.fakes.is_full.store(false, SeqCst);
    assert_eq!(within(bench.sandboxes.visit(&id, LIMIT)).await.unwrap().start, StartKind::Resumed);

    bench.fakes.is_full.store(true, SeqCst);
    assert_eq!(refusal(within(bench.sandboxes.fork(&id, 3, budget)).await).0, Resource::Starts);
    assert_eq!(*bench.fakes.patience.lock().unwrap(), Some(budget));
    assert_eq!(within(bench.sandboxes.list(None)).await.len(), 1);
}

#[tokio::test]
async fn what_a_suspended_one_has_is_known_to_come_back_when_it_is_needed() {
    let bench = Bench::with(World::new(Handle::current()), 100).await;
    let id = bench.create("").await;
    assert_eq!(bench.returning(), 0);
    within(bench.sandboxes.pause(&id, PauseTo::Ram)).await.unwrap();
    assert_eq!(bench.returning(), 72 * MIB);
    // Whoever needs it waits, and gets it when it is on disk.
    let node = bench.fakes.admission.clone();
    let needs = tokio::spawn(async move { node.admit_returning(Charge::process(64), None).await });
    bench.until_waited_for().await;
    bench.sandboxes.spare_one();
    drop(within(needs).await.unwrap().unwrap());
    bench.until(&id, State::Hibernated).await;

    drop(within(bench.sandboxes.visit(&id, LIMIT)).await.unwrap());
    assert_eq!(bench.returning(), 0, "it runs");
    within(bench.sandboxes.pause(&id, PauseTo::Ram)).await.unwrap();
    let node = bench.fakes.admission.clone();
    let needs = tokio::spawn(async move { node.admit_returning(Charge::process(64), None).await });
    bench.until_waited_for().await;
    // It cannot be saved: nobody waits for that, and it is not asked again.
    bench.fakes.is_full.store(true, SeqCst);
    bench.sandboxes.spare_one();
    assert!(within(needs).await.unwrap().is_err());
    assert_eq!(bench.until(&id, State::Suspended).await.state, State::Suspended);
    assert_eq!(bench.returning(), 0);
    drop(within(bench.sandboxes.visit(&id, LIMIT)).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_refusal_at_the_end_of_a_request_s_time_says_why_and_is_not_late() {
    let bench = Bench::new().await;
    let id = bench.create("").await;
    within(bench.sandboxes.pause(&id, PauseTo::Disk)).await.unwrap();
    // Its turn does not come until the time is over.
    bench.fakes.is_tardy.store(true, SeqCst);
    let budget = Duration::from_secs(5);
    let visits = within(join_all((0..4).map(|_| bench.sandboxes.visit(&id, budget)))).await;
    for visit in visits {
        assert_eq!(refusal(visit), (Resource::Starts, Duration::from_secs(3)));
    }
    bench.until(&id, State::Hibernated).await;
    bench.fakes.is_tardy.store(false, SeqCst);
    assert_eq!(within(bench.sandboxes.visit(&id, budget)).await.unwrap().start, StartKind::Resumed);
}

#[tokio::test(start_paused = true)]
async fn the_children_of_a_fork_wait_for_memory_that_is_on_its_way_and_no_longer_than_they_may() {
    let bench = Bench::with(World::new(Handle::current()), 200).await;
    let [parent, other] = [bench.create("").await, bench.create("").await];
    let fork = |budget| bench.sandboxes.fork(&parent, 1, budget);
    // Nothing is on its way: refused at once.
    let before = tokio::time::Instant::now();
    assert_eq!(refusal(within(fork(LIMIT / 2)).await).0, Resource::Memory);
    assert_eq!(tokio::time::Instant::now(), before, "it waited");
    // What the other has is, once it is suspended; and it comes when that is on disk.
    within(bench.sandboxes.pause(&other, PauseTo::Ram)).await.unwrap();
    let gives_way = async {
        bench.until_waited_for().await;
        bench.sandboxes.spare_one();
    };
    let (forked, ()) = within(async { tokio::join!(fork(LIMIT / 2), gives_way) }).await;
    let children = forked.unwrap();
    assert_eq!(bench.until(&other, State::Hibernated).await.state, State::Hibernated);
    within(bench.sandboxes.kill(children[0].id.as_str())).await.unwrap();

    // Nor longer than its time: it is suspended, and nobody sends it to disk.
    drop(within(bench.sandboxes.visit(&other, LIMIT)).await.unwrap());
    within(bench.sandboxes.pause(&other, PauseTo::Ram)).await.unwrap();
    let (begun, budget) = (tokio::time::Instant::now(), Duration::from_secs(5));
    assert_eq!(refusal(within(fork(budget)).await).0, Resource::Memory);
    assert!(begun.elapsed() >= budget, "what it could have had was on its way");
    let left = within(bench.sandboxes.list(None)).await;
    assert_eq!(left.len(), 2, "no child stays");
    assert_eq!(bench.show(&parent).await.state, State::Running);
}

#[tokio::test]
async fn a_full_disk_is_said_in_the_system_s_words_and_once() {
    let bench = Bench::new().await;
    let id = bench.create("").await;
    let path = std::path::PathBuf::from("/data/sandboxes/x");
    let full = || std::io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error());
    let clone = || stasis_cow::CloneError::Io { action: "create", path: path.clone(), source: full() };
    for error in [
        MachineError::Save(SaveError::Clone(clone())),
        MachineError::Save(SaveError::Io(full())),
        MachineError::Keep(full()),
    ] {
        let words = error.told(id.parse().unwrap(), "be paused").to_string();
        assert_eq!(words.matches("No space left on device").count(), 1, "{words}");
    }
    *bench.fakes.unsavable.lock().unwrap() = Some(MachineError::Save(SaveError::Clone(clone())));
    let refused = within(bench.sandboxes.pause(&id, PauseTo::Disk)).await.unwrap_err().to_string();
    assert!(refused.contains("No space left on device"), "{refused}");
    let shown = bench.show(&id).await;
    assert!(shown.failure.is_some_and(|why| why.contains("No space left on device")), "{:?}", shown.state);
}
