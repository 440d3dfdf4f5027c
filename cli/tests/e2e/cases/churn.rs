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
    world::{World, becomes, eventually},
};

/// How many.
const SANDBOXES: u64 = 2000;
/// How many at a time.
const AT_ONCE: u64 = 50;
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
    let now = becomes(&bare, SOON, || Held::when_quiet(&server));
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
    memory: u64,
    vcpus: u64,
    turns: [u64; 2],
    waiting: u64,
    /// For people: an allocator keeps what it was given back.
    resident: String,
}

impl PartialEq for Held {
    fn eq(&self, other: &Self) -> bool {
        let of = |held: &Self| (held.ledger.clone(), held.files, held.memory, held.vcpus, held.turns, held.waiting);
        of(self) == of(other)
    }
}

impl Held {
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
        let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        Self {
            ledger: Ledger::of(server, std::slice::from_ref(&api)),
            files: host::files_of(server.pid()),
            memory: number("/memory/committed"),
            vcpus: number("/vcpus/committed"),
            turns: [number("/starts/under_way"), number("/repairs/under_way")],
            waiting,
            resident: resident.trim().to_owned(),
        }
    }
}
