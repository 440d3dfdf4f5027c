//! Pauses against requests, at random moments, through all of the node's own code: the service, the driver, the store, the VM's handle. The
//! guest is a fake that counts.

use tokio::{io::AsyncWriteExt, task::yield_now};
use uuid::Uuid;

use super::*;
use crate::vmm::fake::SERVED;

/// Pauses that meet requests.
const PAUSES_TRIED: u64 = 10_000;
/// Sandboxes that are there at once.
const SANDBOXES: u64 = 4;

/// Numbers that look random: splitmix64 (Steele, Lea and Flood, 2014).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

async fn delay(steps: u64) {
    for _ in 0..steps {
        yield_now().await;
    }
}

/// What happened, for the log.
#[derive(Debug, Default)]
struct Tally {
    pauses: u64,
    called_off: u64,
    met_running: u64,
    met_paused: u64,
}

/// One request, which must be answered, once.
async fn request(sandboxes: &LocalSandboxes, id: &str, number: u64, after: u64) -> StartKind {
    delay(after).await;
    let mut visit =
        sandboxes.visit(id, LIMIT).await.unwrap_or_else(|error| panic!("request {number} is lost: {error}"));
    visit.stream.write_u64(number).await.unwrap();
    let answer = visit.stream.read_u64().await.unwrap_or_else(|error| panic!("request {number} is cut: {error}"));
    assert_eq!(answer, number);
    visit.start
}

/// A sandbox's share of them.
async fn race(sandboxes: LocalSandboxes, id: String, mut chance: Chance) -> Tally {
    let mut tally = Tally::default();
    for _ in 0..PAUSES_TRIED / SANDBOXES {
        let to = if chance.below(8) == 0 { PauseTo::Disk } else { PauseTo::Ram };
        let (pause_after, requests) = (chance.below(60), 1 + chance.below(3));
        let asked: Vec<_> = (0..requests).map(|_| (chance.next(), chance.below(60))).collect();
        let pause = async {
            delay(pause_after).await;
            sandboxes.pause(&id, to).await
        };
        let visits = join_all(asked.iter().map(|(number, after)| request(&sandboxes, &id, *number, *after)));
        let (paused, starts) = within(async { tokio::join!(pause, visits) }).await;
        match paused {
            Ok(_) => tally.pauses += 1,
            // It was being paused or resumed already, or a request had it resumed before it was on disk.
            Err(SandboxError::State { .. } | SandboxError::NotDone { .. }) => tally.called_off += 1,
            Err(error) => panic!("{error}"),
        }
        for start in starts {
            *if start == StartKind::Resumed { &mut tally.met_paused } else { &mut tally.met_running } += 1;
        }
        let mut served = SERVED.lock().unwrap();
        for (number, _) in asked {
            let (times, stood_still) = served.remove(&number).expect("whoever was answered was served");
            assert_eq!(times, 1, "request {number} was executed twice");
            assert!(!stood_still, "request {number} was executed while its VM was paused");
        }
    }
    tally
}

#[expect(clippy::disallowed_methods, reason = "a test has no arguments of its own")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_pauses_against_requests_lose_none_and_stop_no_vm_under_one() {
    let set = std::env::var("STASIS_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = set.unwrap_or_else(|| u64::from(std::process::id()) << 32 | Uuid::new_v4().as_u64_pair().0 >> 32);
    println!("STASIS_SEED={seed}");
    let bench = Bench::with(World::new(Handle::current()), 10_000).await;
    *bench.fakes.agent.lock().unwrap() = Agent::Counts;
    let mut chance = Chance(seed);
    let mut races = Vec::new();
    for _ in 0..SANDBOXES {
        let id = bench.create(r#","timeout":"1h","idle":"0s""#).await;
        races.push(tokio::spawn(race(bench.sandboxes.clone(), id, Chance(chance.next()))));
    }
    let mut all = Tally::default();
    for race in races {
        let tally = race.await.unwrap();
        all.pauses += tally.pauses;
        all.called_off += tally.called_off;
        all.met_running += tally.met_running;
        all.met_paused += tally.met_paused;
    }
    println!("{all:?}");
    assert_eq!(all.pauses + all.called_off, PAUSES_TRIED);
    let least = PAUSES_TRIED / 20;
    assert!(all.pauses > least && all.met_running > least && all.met_paused > least, "hardly tried: {all:?}");
    assert!(SERVED.lock().unwrap().is_empty(), "somebody was served who had not asked");
}
