//! A hundred claims of two tenants at once on ten VMs, and the server killed in their midst, again and again: whose a VM is, is never
//! in doubt.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io,
    path::Path,
    sync::{
        Barrier,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use serde_json::{Value, json};

use super::{Case, on_the_host, sandboxes, templates};
use crate::{
    chance::Chance,
    fixtures,
    http::{Answer, Api},
    lane,
    ledger::Ledger,
    server::Server,
    world::{World, eventually},
};

/// How often the server is killed in the midst of claims.
const KILLS: u64 = 10;
/// Claims at once.
const CLAIMS: usize = 100;
/// VMs of each tenant's pool: ten of both.
const VMS: u32 = 5;
/// How long anything may take on a loaded machine.
const SOON: Duration = Duration::from_secs(60);

const TENANTS: [&str; 2] = ["a", "b"];

pub(super) fn cases() -> Vec<Case> {
    vec![on_the_host(
        "no VM has two owners or serves two tenants, though the server is killed amid a hundred claims",
        owners,
    )]
}

fn key(tenant: &str) -> String {
    format!("key-of-tenant-{tenant}-0123456789abcdef0")
}

fn start(data: &Path, tenants: &Path) -> Server {
    // Short of what a hundred claims need on a slow machine: some are then refused.
    Server::start(data, &["--tenants", tenants.to_str().unwrap(), "--claim-budget", "2s"])
}

/// The API for each tenant.
fn apis(server: &Server) -> [Api; 2] {
    TENANTS.map(|tenant| server.api().with_key(&key(tenant)))
}

/// What an answer of a tenant's said of the VM that gave it.
struct Served {
    tenant: &'static str,
    vm: String,
    guest: Value,
}

/// How a claim ended.
enum Outcome {
    Served(Served),
    Refused(String),
    /// Its connection ended before its answer: the server was killed.
    Cut,
}

/// A tenant's sandbox, which outlives the server.
struct Sandbox {
    id: String,
    tenant: &'static str,
    /// What it was told to remember, and said that it would.
    told: Vec<String>,
}

/// All that was seen, of all rounds.
#[derive(Default)]
struct Seen {
    /// Whatever belongs to one life of a VM.
    lives: HashSet<String>,
    answers: usize,
    refusals: BTreeMap<String, usize>,
    cut: usize,
}

fn owners(world: &World) {
    let mut chance = Chance::of("owners");
    let tenants = TENANTS.map(|name| format!("[[tenant]]\nname = \"{name}\"\nkey = \"{}\"\n", key(name))).concat();
    let tenants = world.file("owners.toml", tenants);
    let data = world.place("owners");
    let server = start(&data, &tenants);
    let [a, _] = apis(&server);
    templates::build(&a, "/v1/templates", &fixtures::identity_as("shared"));
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
        amid_claims(server, &mut chance, round, &mut seen, &mut kept);
        let server = start(&data, &tenants);
        kept.retain_mut(|sandbox| goes_on(&apis(&server), sandbox, round));
        server
    });
    println!(
        "{kills} kills amid {CLAIMS} claims: {} answers, refused {:?}, {} cut by the kill",
        seen.answers, seen.refusals, seen.cut
    );
    assert!(seen.answers > 0 && seen.cut > 0, "nothing was tried");
    for (api, tenant) in apis(&server).iter().zip(TENANTS) {
        let kept: HashSet<_> = kept.iter().filter(|one| one.tenant == tenant).map(|one| one.id.clone()).collect();
        for left in api.get("/v1/sandboxes").success()["sandboxes"].as_array().unwrap() {
            let id = left["id"].as_str().unwrap();
            // Whoever had it made was cut off before the answer.
            assert!(kept.contains(id) || left["state"] == "running" || left["state"] == "failed", "{left}");
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
        let ready = || {
            let pool = api.get("/v1/pools/shared").success();
            (pool["ready"] == 1 && pool["restoring"] == 0 && pool["claimed"] == 0).then_some(())
        };
        eventually("a VM of each tenant's stands ready", SOON, ready);
    }
}

/// A hundred claims; the server is killed when some of them are answered.
fn amid_claims(server: Server, chance: &mut Chance, round: u64, seen: &mut Seen, kept: &mut Vec<Sandbox>) {
    let (apis, killed) = (apis(&server), AtomicBool::new(false));
    let together = Barrier::new(CLAIMS + TENANTS.len());
    let mut served = Vec::new();
    thread::scope(|scope| {
        let (told, outcomes) = mpsc::channel();
        for number in 0..CLAIMS {
            let (api, tenant) = (&apis[number % 2], TENANTS[number % 2]);
            let (told, killed, together) = (told.clone(), &killed, &together);
            scope.spawn(move || {
                together.wait();
                told.send(claim(api, tenant, &format!("{tenant}-{round}-{number}"), killed)).unwrap();
            });
        }
        let making: Vec<_> = apis
            .iter()
            .zip(TENANTS)
            .map(|(api, tenant)| {
                let (together, killed) = (&together, &killed);
                scope.spawn(move || {
                    together.wait();
                    make(api, tenant, round, killed)
                })
            })
            .collect();
        drop(told);
        // Another moment each time.
        let answers = chance.below(60);
        for _ in 0..answers {
            served.extend(seen.note(outcomes.recv_timeout(SOON).expect("nothing is answered")));
        }
        chance.pass(Duration::from_millis(50));
        killed.store(true, Ordering::SeqCst);
        server.kill();
        outcomes.into_iter().for_each(|outcome| served.extend(seen.note(outcome)));
        kept.extend(making.into_iter().filter_map(|one| one.join().unwrap()));
    });
    whose(&server, &served);
}

/// One claim. Every caller is answered, refused in so many words, or was there when the server was killed.
fn claim(api: &Api, tenant: &'static str, token: &str, killed: &AtomicBool) -> Outcome {
    let Some(answer) = answer(api.try_call("GET", &format!("/invoke/shared/mark/{token}"), &[], b""), killed) else {
        return Outcome::Cut;
    };
    if answer.status() != 200 {
        return Outcome::Refused(refusal(&answer));
    }
    let (guest, vm) = (answer.json(), answer.header("x-stasis-vm").to_owned());
    // Nobody was in this life of it before, and none of its earlier ones has left a trace.
    assert_eq!((&guest["counter"], &guest["memory"], &guest["disk"]), (&json!(1), &json!([]), &json!([])), "{guest}");
    Outcome::Served(Served { tenant, vm, guest })
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
    assert!(answer.status() == 429 && ["exhausted", "no_capacity"].contains(&code.as_str()), "{}", answer.text());
    answer.header("retry-after");
    code
}

/// A sandbox, while the claims are made; and what it remembers of the requests to it.
fn make(api: &Api, tenant: &'static str, round: u64, killed: &AtomicBool) -> Option<Sandbox> {
    let new = json!({ "template": "shared", "timeout": "1h", "idle": "0s", "hibernate_after": "0s" }).to_string();
    let made = answer(api.try_call("POST", "/v1/sandboxes", &[], new.as_bytes()), killed)?;
    if made.status() != 201 {
        refusal(&made);
        return None;
    }
    let id = made.json()["id"].as_str().unwrap().to_owned();
    let mut sandbox = Sandbox { id, tenant, told: Vec::new() };
    for number in 0.. {
        let token = format!("{tenant}-{round}-{number}");
        let Some(told) = answer(api.try_call("GET", &sandbox.at(&token), &[], b""), killed) else { break };
        sandbox.remembers(&told.success(), token);
    }
    Some(sandbox)
}

impl Sandbox {
    fn at(&self, token: &str) -> String {
        format!("/sandbox/{}/mark/{token}", self.id)
    }

    /// It holds what it was told, and nothing of anybody else.
    fn remembers(&mut self, guest: &Value, token: String) {
        let held: Vec<String> = serde_json::from_value(guest["memory"].clone()).unwrap();
        let foreign = |token: &&String| !token.starts_with(&format!("{}-", self.tenant));
        assert_eq!(held.iter().find(foreign), None, "{} is {}'s: {guest}", self.id, self.tenant);
        assert!(self.told.iter().all(|told| held.contains(told)), "{:?} was told: {guest}", self.told);
        assert_eq!(guest["memory"], guest["disk"], "{guest}");
        self.told = held;
        self.told.push(token);
    }
}

/// After a kill: it is there for its tenant alone. It stays for one more round.
fn goes_on(apis: &[Api; 2], sandbox: &mut Sandbox, round: u64) -> bool {
    let whose = TENANTS.iter().position(|tenant| *tenant == sandbox.tenant).unwrap();
    let (own, other) = (&apis[whose], &apis[1 - whose]);
    let token = format!("{}-after-{round}", sandbox.tenant);
    assert_eq!(other.get(&sandbox.at("foreign")).status(), 404);
    let guest = own.get(&sandbox.at(&token)).success();
    sandbox.remembers(&guest, token);
    let is_old = sandbox.told.iter().filter(|token| token.contains("after")).count() > 1;
    if is_old {
        sandboxes::kill(own, &sandbox.id);
    }
    !is_old
}

impl Seen {
    /// No life of a VM has answered before.
    fn note(&mut self, outcome: Outcome) -> Option<Served> {
        match outcome {
            Outcome::Served(served) => {
                self.answers += 1;
                let of_guest =
                    ["boot_nonce", "machine_id", "hostname", "random"].map(|own| served.guest[own].to_string());
                for own in of_guest.into_iter().chain([served.vm.clone()]) {
                    assert!(self.lives.insert(own.clone()), "{own} was seen before: {}", served.guest);
                }
                return Some(served);
            }
            Outcome::Refused(code) => *self.refusals.entry(code).or_default() += 1,
            Outcome::Cut => self.cut += 1,
        }
        None
    }
}

/// A process may live many lives, all of them for one tenant. The log says which VM was which.
fn whose(server: &Server, served: &[Served]) {
    let mut owners: HashMap<String, &str> = HashMap::new();
    for Served { tenant, vm, guest } in served {
        let awake = server.log.line("awake", |fields| fields["vm"] == **vm);
        let slot = awake["slot"].as_str().unwrap().to_owned();
        let owner = *owners.entry(slot.clone()).or_insert(tenant);
        assert_eq!(owner, *tenant, "VM {slot} has served both: {guest}");
    }
}
