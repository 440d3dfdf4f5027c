//! Sandboxes made and killed, fifty at a time: nothing of them stays, and the last take no longer than the first.

use std::{
    fs,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use super::{Case, of_the_bare_guest, sandboxes, templates};
use crate::{
    fixtures, host,
    http::Api,
    lane,
    ledger::Ledger,
    server::Server,
    world::{World, eventually},
};

/// How many.
const SANDBOXES: u64 = 2000;
/// How many at a time.
const AT_ONCE: u64 = 50;
/// A block of the data volume, in blocks of 512 bytes: the least that a file takes that is not empty.
const BLOCK: u64 = 8;
/// How long anything may take on a loaded machine.
const SOON: Duration = Duration::from_secs(60);

pub(super) fn cases() -> Vec<Case> {
    vec![of_the_bare_guest("sandboxes made and killed, fifty at a time, leave nothing and slow nothing down", churn)]
}

fn churn(world: &World) {
    let data = world.place("churn");
    let server = Server::start_bare(&data, &[]);
    let api = server.api();
    templates::build(&api, "/v1/templates", &fixtures::bare("churned", ""));
    // Whatever is made once, at first use, is there after these.
    lives(&api, AT_ONCE);
    let bare = Held::when_quiet(&server);
    let total = lane::number("STASIS_E2E_SANDBOXES", SANDBOXES);
    let ends = lives(&api, total);
    let rate = |quarter: usize| {
        let (from, to) = (ends.len() * quarter / 4, ends.len() * (quarter + 1) / 4);
        let begun = if from == 0 { Duration::ZERO } else { ends[from - 1] };
        (to - from) as f64 / (ends[to - 1] - begun).as_secs_f64()
    };
    let rates: Vec<_> = (0..4).map(|quarter| format!("{:.1}", rate(quarter))).collect();
    let begun = Instant::now();
    let now = loop {
        let now = Held::when_quiet(&server);
        if now.is_back(&bare, total) {
            break now;
        }
        assert!(begun.elapsed() < SOON, "within {SOON:?} it is not what it was:\n now {now:?}\n was {bare:?}");
    };
    println!(
        "{total} sandboxes made and killed, {AT_ONCE} at a time: {} per second in each quarter; memory of the server {} before, {} now; {now:?}",
        rates.join(", "),
        bare.resident,
        now.resident
    );
    assert_eq!(server.stop(), Vec::<String>::new());
    // The next one reads the store.
    let server = Server::start_bare(&data, &[]);
    assert_eq!(server.api().get("/v1/sandboxes").success(), json!({ "sandboxes": [] }));
    assert_eq!(server.stop(), Vec::<String>::new());
}

/// Makes and kills so many sandboxes; when each was gone.
fn lives(api: &Api, total: u64) -> Vec<Duration> {
    let (begun, next) = (Instant::now(), AtomicU64::new(0));
    let mut ends: Vec<_> = thread::scope(|scope| {
        let life = || {
            let mut ends = Vec::new();
            while next.fetch_add(1, Ordering::Relaxed) < total {
                let id = sandboxes::create(api, &json!({ "template": "churned" }));
                sandboxes::kill(api, &id);
                ends.push(begun.elapsed());
            }
            ends
        };
        let all: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(life)).collect();
        all.into_iter().flat_map(|one| one.join().unwrap()).collect()
    });
    ends.sort_unstable();
    ends
}

/// What the server holds, of the host and of its own budgets.
#[derive(Debug)]
struct Held {
    ledger: Ledger,
    files: usize,
    /// Blocks and files of the data volume, also those that have no name any more; without the store's, whose log grows for a while.
    volume: [u64; 2],
    /// Series of `/metrics`.
    series: usize,
    memory: u64,
    vcpus: u64,
    turns: [u64; 2],
    waiting: u64,
    /// For people: an allocator keeps what it was given back.
    resident: String,
}

impl Held {
    /// As before so many sandboxes. Of the volume's blocks, its file system takes some for itself: not one for each.
    fn is_back(&self, before: &Self, sandboxes: u64) -> bool {
        let budgets = |held: &Self| (held.memory, held.vcpus, held.turns, held.waiting);
        let [blocks, files] = self.volume;
        self.ledger == before.ledger
            && self.files <= before.files
            && (blocks < before.volume[0] + sandboxes * BLOCK && files <= before.volume[1])
            && self.series == before.series
            && budgets(self) == budgets(before)
    }

    /// When the pool has what it wants, and no more.
    fn when_quiet(server: &Server) -> Self {
        let api = server.api();
        let pool = || {
            let pool = api.get("/v1/pools/churned").success();
            let quiet = ["restoring", "rewinding", "warming", "claimed"].iter().all(|doing| pool[doing] == 0);
            Some(pool).filter(|pool| quiet && pool["ready"] == 1)
        };
        let waiting = eventually("the pool is quiet", SOON, pool)["waiting"].as_u64().unwrap();
        let capacity = api.get("/v1/capacity").success();
        let number = |place: &str| capacity.pointer(place).unwrap().as_u64().unwrap();
        let [blocks, files] = host::used(&server.files());
        let store = ["", "-wal", "-shm"].map(|part| server.files().join(format!("sandboxes.sqlite{part}")));
        let store = store.iter().map(|file| host::blocks_of(file)).sum::<u64>();
        let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        Self {
            ledger: Ledger::of(server, std::slice::from_ref(&api)),
            files: host::files_of(server.pid()),
            volume: [blocks - store, files],
            series: api.get("/metrics").text().lines().filter(|line| !line.starts_with('#')).count(),
            memory: number("/memory/committed"),
            vcpus: number("/vcpus/committed"),
            turns: [number("/starts/under_way"), number("/repairs/under_way")],
            waiting,
            resident: resident.trim().to_owned(),
        }
    }
}
