//! A hundred claims of two tenants at once on ten VMs, and the server killed in their midst, again and again: whose a VM is, is never
//! in doubt.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io,
    path::Path,
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use serde_json::{Value, json};

use super::{Case, of_the_bare_guest, sandboxes, templates};
use crate::{
    chance::Chance,
    fixtures,
    http::{Answer, Api},
    lane,
    ledger::Ledger,
    server::Server,
    world::{World, becomes},
};

/// How often the server is killed in the midst of claims.
const KILLS: u64 = 10;
/// Claims at once.
const CLAIMS: usize = 100;
/// VMs of each tenant's pool: ten of both.
const VMS: u32 = 5;
/// Requests that may be there at once; the others are refused, in so many words.
const CONCURRENCY: &str = "concurrency = 95\n";
/// How long a claim waits for a VM. Some keep theirs for longer, and are more than there are VMs: not all can have one in time.
const PATIENCE: &str = "1s";
const KEPT: Duration = Duration::from_millis(1500);
/// How long anything may take on a loaded machine.
const SOON: Duration = Duration::from_secs(60);

const TENANTS: [&str; 2] = ["a", "b"];

pub(super) fn cases() -> Vec<Case> {
    vec![of_the_bare_guest(
        "no VM has two owners or serves two tenants, though the server is killed amid a hundred claims",
        owners,
    )]
}

fn key(tenant: &str) -> String {
    format!("key-of-tenant-{tenant}-0123456789abcdef0")
}

fn start(data: &Path, tenants: &Path) -> Server {
    Server::start_bare(data, &["--tenants", tenants.to_str().unwrap(), "--claim-budget", PATIENCE])
}

/// The API for each tenant.
fn apis(server: &Server) -> [Api; 2] {
    TENANTS.map(|tenant| server.api().with_key(&key(tenant)))
}

/// Which VM gave a tenant an answer.
struct Served {
    tenant: &'static str,
    vm: String,
    /// It waited for a VM.
    waited: bool,
    /// What that said of itself, if it was asked.
    guest: Option<Value>,
}

/// One claim of a round.
#[derive(Debug, Clone, Copy)]
struct Claim {
    tenant: &'static str,
    round: u64,
    number: usize,
    /// It was cut off once: it keeps its VM for no longer than it must.
    again: bool,
}

/// How a claim ended.
enum Outcome {
    Served(Served),
    Refused(String),
    /// Its connection ended before its answer: the server was killed.
    Cut(Claim),
}

/// A tenant's sandbox, which outlives the server.
struct Sandbox {
    id: String,
    tenant: &'static str,
    /// What it said that it would remember, and what it was told last.
    told: [String; 2],
    /// How many kills it has gone through.
    rounds: u32,
}

/// All that was seen, of all rounds.
#[derive(Default)]
struct Seen {
    /// Whatever belongs to one life of a VM.
    lives: HashSet<String>,
    answers: usize,
    waits: usize,
    refusals: BTreeMap<String, usize>,
    /// Of claims that were cut off by a kill, and asked the next server.
    cut: usize,
    again: usize,
}

fn owners(world: &World) {
    let mut chance = Chance::of("owners");
    let tenants = TENANTS.map(|name| format!("[[tenant]]\nname = \"{name}\"\nkey = \"{}\"\n", key(name))).concat();
    let tenants = world.file("owners.toml", tenants);
    let data = world.place("owners");
    let server = start(&data, &tenants);
    let [a, _] = apis(&server);
    templates::build(&a, "/v1/templates", &fixtures::bare("shared", CONCURRENCY));
    for api in apis(&server) {
        let set = json!({ "min": 1, "max": VMS }).to_string();
        api.call("PATCH", "/v1/pools/shared", &[], set.as_bytes()).success();
    }
    until_ready(&server);
    let bare = Ledger::of(&server, &apis(&server));
    assert_eq!(bare.count("processes"), 3, "the server and two VMs: {bare:?}");

    let (mut seen, mut kept) = (Seen::default(), Vec::new());
    let kills = lane::number("STASIS_E2E_KILLS", KILLS);
    let server = (0..kills).fold(server, |server, round| {
        let cut = amid_claims(server, &mut chance, round, &mut seen, &mut kept);
        let server = start(&data, &tenants);
        once_more(&server, cut, &mut seen);
        kept.retain_mut(|sandbox| goes_on(&apis(&server), sandbox));
        server
    });
    let Seen { answers, waits, refusals, cut, again, .. } = &seen;
    println!(
        "{kills} kills amid {CLAIMS} claims: {answers} answers, {waits} of them waited for, refused {refusals:?}; {cut} cut by the kill, \
         of which the next server answered {again}"
    );
    let exhausted = refusals.get("exhausted").copied().unwrap_or_default();
    assert!([*answers, *waits, exhausted, *cut, *again].iter().all(|tried| *tried > 0), "not all was tried");
    // A pool keeps what a crowd needed; the next one's begin anew.
    server.kill();
    let server = start(&data, &tenants);
    for (api, tenant) in apis(&server).iter().zip(TENANTS) {
        let kept: HashSet<_> = kept.iter().filter(|one| one.tenant == tenant).map(|one| one.id.clone()).collect();
        for left in api.get("/v1/sandboxes").success()["sandboxes"].as_array().unwrap() {
            let id = left["id"].as_str().unwrap();
            // Nobody was told of it: the server removes it.
            if left["state"] == "killing" {
                continue;
            }
            // Whoever had it made was cut off amid the answer.
            assert!(kept.contains(id) || left["state"] == "running", "{left}");
            sandboxes::kill(api, id);
        }
    }
    until_ready(&server);
    bare.returns(&server, &apis(&server));
    assert_eq!(server.stop(), Vec::<String>::new());
}

/// Both pools have what they want, and nothing else.
fn until_ready(server: &Server) {
    for api in apis(server) {
        becomes(&json!({ "ready": 1, "restoring": 0, "claimed": 0 }), SOON, || {
            let pool = api.get("/v1/pools/shared").success();
            json!({ "ready": pool["ready"], "restoring": pool["restoring"], "claimed": pool["claimed"] })
        });
    }
}

/// A hundred claims; the server is killed when some of them are answered, and in every second round some refused. Returns those that were cut
/// off.
fn amid_claims(
    server: Server,
    chance: &mut Chance,
    round: u64,
    seen: &mut Seen,
    kept: &mut Vec<Sandbox>,
) -> Vec<Claim> {
    let (apis, killed) = (apis(&server), AtomicBool::new(false));
    let together = Barrier::new(CLAIMS + TENANTS.len());
    let (mut served, mut cut) = (Vec::new(), Vec::new());
    thread::scope(|scope| {
        let (told, outcomes) = mpsc::channel();
        for number in 0..CLAIMS {
            let (api, claim) = (&apis[number % 2], Claim { tenant: TENANTS[number % 2], round, number, again: false });
            let (told, killed, together) = (told.clone(), &killed, &together);
            scope.spawn(move || {
                together.wait();
                told.send(claim.made(api, killed)).unwrap();
            });
        }
        let making: Vec<_> = apis
            .iter()
            .zip(TENANTS)
            .map(|(api, tenant)| {
                let (together, killed) = (&together, &killed);
                scope.spawn(move || make(api, tenant, round, killed, together))
            })
            .collect();
        drop(told);
        // None when all have ended before anybody was sent away.
        let next = || match outcomes.recv_timeout(SOON) {
            Ok(outcome) => Some(outcome),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("nothing is answered"),
        };
        let mut note = |seen: &mut Seen, outcome| match outcome {
            Outcome::Served(one) => {
                seen.served(&one);
                served.push(one);
            }
            Outcome::Refused(code) => *seen.refusals.entry(code).or_default() += 1,
            Outcome::Cut(claim) => cut.push(claim),
        };
        // Another moment each time.
        let exhausted = |seen: &Seen| seen.refusals.get("exhausted").copied().unwrap_or_default();
        let before = exhausted(seen);
        while round % 2 == 1
            && exhausted(seen) == before
            && let Some(outcome) = next()
        {
            note(seen, outcome);
        }
        for outcome in std::iter::from_fn(next).take(usize::try_from(chance.below(30)).unwrap()) {
            note(seen, outcome);
        }
        chance.pass(Duration::from_millis(5));
        killed.store(true, Ordering::SeqCst);
        server.kill();
        outcomes.into_iter().for_each(|outcome| note(seen, outcome));
        kept.extend(making.into_iter().filter_map(|one| one.join().unwrap()));
    });
    seen.cut += cut.len();
    whose(&server, &served);
    cut
}

/// Whoever was cut off by the kill asks the next server, which answers, or refuses in so many words.
fn once_more(server: &Server, cut: Vec<Claim>, seen: &mut Seen) {
    let (apis, killed) = (apis(server), AtomicBool::new(false));
    let mut served = Vec::new();
    let outcomes: Vec<_> = thread::scope(|scope| {
        let asking = cut.into_iter().map(|claim| {
            let (api, killed) = (&apis[claim.number % 2], &killed);
            scope.spawn(move || Claim { again: true, ..claim }.made(api, killed))
        });
        let asking: Vec<_> = asking.collect();
        asking.into_iter().map(|one| one.join().unwrap()).collect()
    });
    for outcome in outcomes {
        match outcome {
            Outcome::Served(one) => {
                seen.served(&one);
                seen.again += 1;
                served.push(one);
            }
            Outcome::Refused(code) => *seen.refusals.entry(code).or_default() += 1,
            Outcome::Cut(_) => unreachable!("nobody is cut off unless the server was killed"),
        }
    }
    whose(server, &served);
}

impl Claim {
    /// Every caller is answered, refused in so many words, or was there when the server was killed. It leaves its tenant's token in memory, looks
    /// for others', or keeps its VM for long.
    fn made(self, api: &Api, killed: &AtomicBool) -> Outcome {
        let Self { tenant, round, number, again } = self;
        let token = format!("{tenant}-{round}-{number}");
        let wait = format!("wait/{}", KEPT.as_micros());
        let (method, target, body) = match number / TENANTS.len() % 8 {
            // More of them than there are VMs, though some are refused for `concurrency`.
            3 | 7 if !again => ("GET", wait.as_str(), ""),
            0 | 3 | 6 => ("PUT", "memory", token.as_str()),
            1 | 4 | 7 => ("GET", "memory", ""),
            _ => ("GET", "identity", ""),
        };
        let answer = answer(api.try_call(method, &format!("/invoke/shared/{target}"), &[], body.as_bytes()), killed);
        let Some(answer) = answer else { return Outcome::Cut(self) };
        if answer.status() != 200 {
            return Outcome::Refused(refusal(&answer));
        }
        let vm = answer.header("x-stasis-vm").to_owned();
        match (method, target) {
            ("PUT", _) => assert_eq!(answer.text(), "kept\n"),
            (_, "memory") => assert_eq!(answer.text(), "", "a trace of somebody, for {tenant}"),
            // Nobody was in this life of it before.
            (_, "identity") => assert_eq!(answer.json()["answered"], 1, "{}", answer.text()),
            _ => assert_eq!(answer.text(), "waited\n"),
        }
        let guest = (target == "identity").then(|| answer.json());
        Outcome::Served(Served { tenant, vm, waited: waited(&answer), guest })
    }
}

/// It waited for longer than it takes to be granted a VM that stands ready.
fn waited(answer: &Answer) -> bool {
    let timing = answer.header("server-timing");
    let queue = timing.split(", ").find_map(|phase| phase.strip_prefix("queue;dur=")).unwrap();
    queue.parse::<f64>().unwrap() > 1.0
}

/// None if it was cut off by the kill.
fn answer(answer: io::Result<Answer>, killed: &AtomicBool) -> Option<Answer> {
    match answer {
        Ok(answer) => Some(answer),
        Err(error) => {
            assert!(killed.load(Ordering::SeqCst), "nothing was killed, but {error}");
            None
        }
    }
}

/// The node has no VM to give in time, and says so.
fn refusal(answer: &Answer) -> String {
    let code = answer.json()["error"]["code"].as_str().unwrap_or_default().to_owned();
    assert!(
        answer.status() == 429 && ["exhausted", "no_capacity", "concurrency"].contains(&code.as_str()),
        "{}",
        answer.text()
    );
    answer.header("retry-after");
    code
}

/// A sandbox, made before the claims or amid them; and what it remembers of the requests to it.
fn make(api: &Api, tenant: &'static str, round: u64, killed: &AtomicBool, together: &Barrier) -> Option<Sandbox> {
    if round % 4 > 1 {
        together.wait();
    }
    let new = json!({ "template": "shared", "timeout": "1h", "idle": "0s", "hibernate_after": "0s" }).to_string();
    let made = api.try_call("POST", "/v1/sandboxes", &[], new.as_bytes());
    if round % 4 <= 1 {
        together.wait();
    }
    let made = answer(made, killed)?;
    if made.status() != 201 {
        refusal(&made);
        return None;
    }
    let id = made.json()["id"].as_str().unwrap().to_owned();
    let mut sandbox = Sandbox { id, tenant, told: [String::new(), String::new()], rounds: 0 };
    for number in 0.. {
        // Until it has said that it keeps this one, it may hold either.
        sandbox.told[1] = format!("{tenant}-{round}-{number}");
        let told = api.try_call("PUT", &sandbox.memory(), &[], sandbox.told[1].as_bytes());
        let Some(told) = answer(told, killed) else { break };
        assert_eq!(told.status(), 200, "{}", told.text());
        sandbox.told[0] = sandbox.told[1].clone();
        let Some(held) = answer(api.try_call("GET", &sandbox.memory(), &[], b""), killed) else { break };
        sandbox.remembers(&held);
    }
    Some(sandbox)
}

impl Sandbox {
    fn memory(&self) -> String {
        format!("/sandbox/{}/memory", self.id)
    }

    /// It holds what it was told, and nothing of anybody else.
    fn remembers(&self, held: &Answer) {
        assert_eq!(held.status(), 200, "{}", held.text());
        let Self { id, tenant, told, .. } = self;
        assert!(told.contains(&held.text()), "{id} of {tenant} holds {:?}, not one of {told:?}", held.text());
    }
}

/// After a kill: it is there for its tenant alone, and is what it was. It stays for one more round.
fn goes_on(apis: &[Api; 2], sandbox: &mut Sandbox) -> bool {
    let whose = TENANTS.iter().position(|tenant| *tenant == sandbox.tenant).unwrap();
    let (own, other) = (&apis[whose], &apis[1 - whose]);
    sandboxes::taken_over(own, &sandbox.id);
    assert_eq!(other.get(&sandbox.memory()).status(), 404);
    sandbox.remembers(&own.get(&sandbox.memory()));
    sandbox.rounds += 1;
    if sandbox.rounds == 2 {
        sandboxes::kill(own, &sandbox.id);
    }
    sandbox.rounds < 2
}

impl Seen {
    /// No life of a VM has answered before.
    fn served(&mut self, served: &Served) {
        self.answers += 1;
        self.waits += usize::from(served.waited);
        let own = |guest: &Value| ["boot_nonce", "machine_id", "hostname"].map(|own| guest[own].to_string());
        let of_guest = served.guest.as_ref().map(own).into_iter().flatten();
        for own in of_guest.chain([served.vm.clone()]) {
            assert!(self.lives.insert(own.clone()), "{own} was seen before: {:?}", served.guest);
        }
    }
}

/// A process may live many lives, all of them for one tenant. The log says which VM was which.
fn whose(server: &Server, served: &[Served]) {
    let mut owners: HashMap<String, &str> = HashMap::new();
    for Served { tenant, vm, .. } in served {
        let awake = server.log.line("awake", |fields| fields["vm"] == **vm);
        let slot = awake["slot"].as_str().unwrap().to_owned();
        let owner = *owners.entry(slot.clone()).or_insert(tenant);
        assert_eq!(owner, *tenant, "VM {slot} has served both");
    }
}
