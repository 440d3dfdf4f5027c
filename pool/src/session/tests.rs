//! A sandbox's task, with VMs that are fakes and a store in memory. Real ones are in `cli/tests/e2e`.

mod adopting;
mod answers;
mod damaged;
mod exec;
pub(super) mod fakes;
mod forks;
mod full;
mod leaving;
mod memory;
mod metrics;
mod races;
mod states;
mod store;

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::{BoxFuture, FutureExt, join_all};
use stasis_pool_api::{
    NewSandbox, NextKind, PauseTo, Resource, SandboxError, SandboxId, SandboxInfo, SandboxState as State, Sandboxes,
    StartKind, TemplateName,
};
use stasis_state::{Deadline, MemoryStore, Query, Store};
use tokio::{io::AsyncReadExt, runtime::Handle, sync::watch};

use self::fakes::{Fakes, World};
use super::LocalSandboxes;
use crate::{
    admission::{Admission, Charge},
    vmm::{
        Place,
        fake::{self, Agent},
    },
};

/// No test may hang.
const LIMIT: Duration = Duration::from_secs(60);

struct Bench {
    sandboxes: LocalSandboxes,
    fakes: Arc<Fakes>,
}

impl Bench {
    async fn new() -> Self {
        Self::over(World::new(Handle::current())).await
    }

    /// A node's sandboxes, with what an earlier one has left.
    async fn over(world: World) -> Self {
        Self::with(world, 1000).await
    }

    async fn with(world: World, memory_mib: u64) -> Self {
        let store = Arc::clone(&world.store);
        Self::on(world, store, memory_mib).await
    }

    /// A node with a store of its own.
    async fn storing_in(store: Arc<impl Store>) -> Self {
        Self::on(World::new(Handle::current()), store, 1000).await
    }

    async fn on(world: World, store: Arc<impl Store>, memory_mib: u64) -> Self {
        let fakes = Arc::new(Fakes {
            world,
            admission: Admission::new(memory_mib << 20),
            restored: AtomicU32::new(0),
            births: AtomicU32::new(5),
            made: Mutex::default(),
            held: watch::Sender::new(false),
            agent: Mutex::new(Agent::Honest),
            stuck: AtomicBool::new(false),
            is_full: AtomicBool::new(false),
            is_tardy: AtomicBool::new(false),
            patience: Mutex::default(),
            unsavable: Mutex::default(),
            overlooked: Mutex::default(),
        });
        let version = |name: &TemplateName| (name.as_str() == "x").then(|| "v1".to_owned());
        let sandboxes = LocalSandboxes::start(fakes.clone(), store, version, None).await.unwrap();
        let sandboxes = sandboxes.of(&"default".parse().unwrap());
        Self { sandboxes, fakes }
    }

    async fn create(&self, more: &str) -> String {
        let new: NewSandbox = serde_json::from_str(&format!(r#"{{"template":"x"{more}}}"#)).unwrap();
        let info = within(self.sandboxes.create(new, LIMIT)).await.unwrap();
        assert_eq!(info.state, State::Running);
        info.id.to_string()
    }

    async fn show(&self, id: &str) -> SandboxInfo {
        within(self.sandboxes.inspect(id)).await.unwrap()
    }

    /// Asks until it is so: every question is answered behind all that happened before it.
    async fn until(&self, id: &str, state: State) -> SandboxInfo {
        // By the real clock: one that is paused stands still while we ask.
        let begun = std::time::Instant::now();
        loop {
            let info = self.show(id).await;
            if info.state == state {
                return info;
            }
            assert!(begun.elapsed() < LIMIT, "it is never {state}: {info:?}");
            tokio::task::yield_now().await;
        }
    }

    fn free_mib(&self) -> u32 {
        self.fakes.admission.available_mib()
    }
}

async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, work).await.expect("it hangs")
}

const PAUSES: [(PauseTo, State); 2] = [(PauseTo::Ram, State::Suspended), (PauseTo::Disk, State::Hibernated)];

#[tokio::test]
async fn sixty_four_requests_resume_it_once() {
    let bench = Bench::new().await;
    let id = bench.create("").await;
    for (round, (to, state)) in PAUSES.into_iter().enumerate() {
        assert_eq!(within(bench.sandboxes.pause(&id, to)).await.unwrap().state, state);
        assert_eq!(bench.free_mib(), if state == State::Hibernated { 1000 } else { 1000 - 72 });
        let visits = within(join_all((0..64).map(|_| bench.sandboxes.visit(&id, LIMIT)))).await;
        let mut visits: Vec<_> = visits.into_iter().map(Result::unwrap).collect();
        for visit in &mut visits {
            assert_eq!(visit.start, StartKind::Resumed);
            let mut said = [0; 5];
            within(visit.stream.read_exact(&mut said)).await.unwrap();
            assert_eq!(&said, b"hello");
        }
        assert_eq!(bench.fakes.restored.load(SeqCst), u32::try_from(round).unwrap());
        let info = bench.show(&id).await;
        assert_eq!((info.state, info.requests, info.waiting), (State::Running, 64, 0));
        assert_eq!(info.certificate.unwrap()["generation"], 2, "one wake");
        assert!(bench.fakes.world.saved.lock().unwrap().is_empty(), "what it came from is gone");
        drop(visits);
        assert_eq!(bench.show(&id).await.requests, 0);
    }
}

#[tokio::test]
async fn a_request_keeps_it_awake_until_it_is_over_and_a_pause_waits() {
    let bench = Bench::new().await;
    let id = bench.create("").await;
    let visit = within(bench.sandboxes.visit(&id, LIMIT)).await.unwrap();
    assert_eq!(visit.start, StartKind::Running);
    let mut pausing = bench.sandboxes.pause(&id, PauseTo::Ram);
    let early = tokio::time::timeout(Duration::from_millis(50), &mut pausing).await;
    assert!(early.is_err(), "paused under a request");
    // One that comes now waits for the pause, and then has it resumed.
    let mut late = bench.sandboxes.visit(&id, LIMIT);
    assert!(tokio::time::timeout(Duration::from_millis(50), &mut late).await.is_err());
    drop(visit);
    let (paused, late) = within(async { tokio::join!(pausing, late) }).await;
    paused.unwrap();
    assert_eq!(late.unwrap().start, StartKind::Resumed);
}

#[tokio::test]
async fn it_is_killed_in_every_state_and_nothing_stays() {
    let bench = Bench::new().await;
    for to in [None, Some(PauseTo::Ram), Some(PauseTo::Disk)] {
        let id = bench.create("").await;
        if let Some(to) = to {
            within(bench.sandboxes.pause(&id, to)).await.unwrap();
        }
        within(bench.sandboxes.kill(&id)).await.unwrap();
        assert_eq!(bench.free_mib(), 1000, "after {to:?}");
        assert!(bench.fakes.world.saved.lock().unwrap().is_empty());
        let again = within(bench.sandboxes.kill(&id)).await;
        assert!(matches!(again, Err(SandboxError::Unknown { .. })), "{again:?}");
    }
    // Under a request, whose connection ends.
    let id = bench.create("").await;
    let mut visit = within(bench.sandboxes.visit(&id, LIMIT)).await.unwrap();
    within(bench.sandboxes.kill(&id)).await.unwrap();
    let mut rest = Vec::new();
    within(visit.stream.read_to_end(&mut rest)).await.unwrap();
    assert_eq!(bench.free_mib(), 1000);
}

/// Sandboxes that are there at once, and how often.
const CROWD: usize = 50;
const CROWDS: usize = 40;

#[tokio::test]
async fn two_thousand_sandboxes_fifty_at_a_time_leave_nothing() {
    let bench = Bench::with(World::new(Handle::current()), 10_000).await;
    // Tasks and descriptors of this process.
    let own = || {
        let files = std::fs::read_dir("/proc/self/fd").unwrap().count();
        (Handle::current().metrics().num_alive_tasks(), files)
    };
    let mut first = None;
    for _ in 0..CROWDS {
        let lives = (0..CROWD).map(async |one| {
            let id = bench.create("").await;
            match one % 4 {
                0 => drop(bench.sandboxes.visit(&id, LIMIT).await.unwrap()),
                1 => drop(bench.sandboxes.pause(&id, PauseTo::Ram).await.unwrap()),
                2 => drop(bench.sandboxes.pause(&id, PauseTo::Disk).await.unwrap()),
                _ => {}
            }
            bench.sandboxes.kill(&id).await.unwrap();
        });
        within(join_all(lives)).await;
        // What ends behind an answer has the time that it needs. The runtime has after the first crowd what it will have.
        let most = first.unwrap_or((usize::MAX, usize::MAX));
        within(async {
            while bench.free_mib() < 10_000
                || !bench.sandboxes.read().is_empty()
                || own().0 > most.0
                || own().1 > most.1
            {
                tokio::task::yield_now().await;
            }
        })
        .await;
        first.get_or_insert_with(own);
        let world = &bench.fakes.world;
        let stored = world.store.list(Query { limit: 1, ..Query::default() }).await.unwrap();
        let places = Place::all(world.vms()).unwrap();
        assert!(stored.records.is_empty() && places.is_empty() && world.saved.lock().unwrap().is_empty());
    }
}

#[tokio::test]
async fn its_clock_stands_still_while_it_is_paused() {
    let bench = Bench::new().await;
    let id = bench.create(r#","timeout":"1h","on_timeout":"pause","idle":"0s""#).await;
    let info = bench.show(&id).await;
    assert_eq!(info.next.map(|next| (next.what, Some(next.at))), Some((NextKind::Pause, info.ends_at)));
    let paused = within(bench.sandboxes.pause(&id, PauseTo::Ram)).await.unwrap();
    assert!(paused.ends_at.is_none() && paused.time_left_ms.is_some(), "{paused:?}");
    let (info, resumed) = within(bench.sandboxes.resume(&id, Some(Duration::from_millis(20)))).await.unwrap();
    assert!(resumed && info.ends_at.is_some());
    bench.until(&id, State::Suspended).await;
    let (_, resumed) = within(bench.sandboxes.resume(&id, Some(LIMIT))).await.unwrap();
    assert!(resumed);
    let (_, resumed) = within(bench.sandboxes.resume(&id, None)).await.unwrap();
    assert!(!resumed, "it runs already");
}

#[tokio::test]
async fn idle_pauses_it_unless_held_and_memory_is_given_up_when_short() {
    let bench = Bench::new().await;
    let id = bench.create(r#","idle":"10ms","hibernate_after":"0s""#).await;
    let paused = bench.until(&id, State::Suspended).await;
    assert_eq!(paused.next, None);
    bench.sandboxes.spare_one();
    bench.until(&id, State::Hibernated).await;
    assert_eq!(bench.free_mib(), 1000);
    within(bench.sandboxes.hold(&id, "ci".parse().unwrap(), None)).await.unwrap();
    within(bench.sandboxes.resume(&id, None)).await.unwrap();
    let held = bench.show(&id).await;
    assert_eq!((held.state, held.holds.len()), (State::Running, 1));
    assert_eq!(held.idle.and_then(|idle| idle.will_pause_at), None);
    within(bench.sandboxes.release(&id, "ci".parse().unwrap())).await.unwrap();
    bench.until(&id, State::Suspended).await;
}
