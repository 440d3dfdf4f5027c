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

use super::{Case, of_the_bare_guest, sandboxes, templates};
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
/// Requests that may be there at once; the others are refused, in so many words.
const CONCURRENCY: &str = "concurrency = 80\n";
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
    Server::start_bare(data, &["--tenants", tenants.to_str().unwrap()])
}

/// The API for each tenant.
fn apis(server: &Server) -> [Api; 2] {
    TENANTS.map(|tenant| server.api().with_key(&key(tenant)))
}

/// Which VM gave a tenant an answer.
struct Served {
    tenant: &'static str,
    vm: String,
    /// What that said of itself, if it was asked.
    guest: Option<Value>,
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
        amid_claims(server, &mut chance, round, &mut seen, &mut kept);
        let server = start(&data, &tenants);
        kept.retain_mut(|sandbox| goes_on(&apis(&server), sandbox));
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
                let outcome = claim(api, tenant, &format!("{tenant}-{round}-{number}"), number, killed);
                told.send(outcome).unwrap();
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
        let answers = chance.below(50);
        while (served.len() as u64) < answers {
            served.extend(seen.note(outcomes.recv_timeout(SOON).expect("nothing is answered")));
        }
        chance.pass(Duration::from_millis(5));
        killed.store(true, Ordering::SeqCst);
        server.kill();
        outcomes.into_iter().for_each(|outcome| served.extend(seen.note(outcome)));
        kept.extend(making.into_iter().filter_map(|one| one.join().unwrap()));
    });
    whose(&server, &served);
}

/// One claim. Every caller is answered, refused in so many words, or was there when the server was killed. It leaves its tenant's token in
/// memory, or looks for others'.
fn claim(api: &Api, tenant: &'static str, token: &str, number: usize, killed: &AtomicBool) -> Outcome {
    let (method, target, body) =
        [("PUT", "memory", token), ("GET", "memory", ""), ("GET", "identity", "")][number / 2 % 3];
    let answer = answer(api.try_call(method, &format!("/invoke/shared/{target}"), &[], body.as_bytes()), killed);
    let Some(answer) = answer else { return Outcome::Cut };
    if answer.status() != 200 {
        return Outcome::Refused(refusal(&answer));
    }
    let vm = answer.header("x-stasis-vm").to_owned();
    match (method, target) {
        ("PUT", _) => assert_eq!(answer.text(), "kept\n"),
        (_, "memory") => assert_eq!(answer.text(), "", "a trace of somebody, for {tenant}"),
        // Nobody was in this life of it before.
        _ => assert_eq!(answer.json()["answered"], 1, "{}", answer.text()),
    }
    let guest = (target == "identity").then(|| answer.json());
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
    assert!(
        answer.status() == 429 && ["exhausted", "no_capacity", "concurrency"].contains(&code.as_str()),
        "{}",
        answer.text()
    );
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
    fn note(&mut self, outcome: Outcome) -> Option<Served> {
        match outcome {
            Outcome::Served(served) => {
                self.answers += 1;
                let own = |guest: &Value| ["boot_nonce", "machine_id", "hostname"].map(|own| guest[own].to_string());
                let of_guest = served.guest.as_ref().map(own).into_iter().flatten();
                for own in of_guest.chain([served.vm.clone()]) {
                    assert!(self.lives.insert(own.clone()), "{own} was seen before: {:?}", served.guest);
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
    for Served { tenant, vm, .. } in served {
        let awake = server.log.line("awake", |fields| fields["vm"] == **vm);
        let slot = awake["slot"].as_str().unwrap().to_owned();
        let owner = *owners.entry(slot.clone()).or_insert(tenant);
        assert_eq!(owner, *tenant, "VM {slot} has served both");
    }
}
