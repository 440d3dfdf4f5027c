//! The shipped hooks in real runtimes, against the agent's own side of the protocol.
//!
//! A runtime that is not installed is skipped, loudly.

#![allow(clippy::unwrap_used, reason = "that is how tests fail, in their helpers too")]

use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use stasis_agent::{hooks::Hooks, ioctls::SEED};

fn overlay(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../rootfs/overlay").join(path)
}

/// The agent's side, with nothing else.
struct Agent {
    hooks: Arc<Hooks>,
    path: PathBuf,
    generation: u64,
    _directory: tempfile::TempDir,
}

impl Agent {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hooks.sock");
        let hooks = Arc::new(Hooks::listen(&path).unwrap());
        hooks.accept_in_background().unwrap();
        Self { hooks, path, generation: 0, _directory: directory }
    }

    /// Reseeds every runtime with the same seed, as no agent would: the same numbers must then follow.
    fn reseed(&mut self, seed: u8) -> u32 {
        self.generation += 1;
        let deadline = Instant::now() + Duration::from_secs(20);
        self.hooks.reseed(self.generation, deadline, || Ok([seed; SEED])).unwrap()
    }
}

/// A program that answers each line of input with one of output.
struct Runtime {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Runtime {
    fn start(agent: &Agent, program: &str, arguments: &[&str]) -> Option<Self> {
        let child = Command::new(program)
            .args(arguments)
            .env("STASIS_HOOK_SOCKET", &agent.path)
            .env("PYTHONPATH", overlay("usr/lib/stasis/python"))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("NODE_OPTIONS", format!("--require={}", overlay("usr/lib/stasis/node-hook.cjs").display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut child) = child else {
            eprintln!("SKIPPED: no {program} on this machine");
            return None;
        };
        let (stdin, stdout) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Some(Self { child, stdin, stdout })
    }

    fn python(agent: &Agent, code: &str) -> Option<Self> {
        Self::start(agent, "python3", &["-c", code])
    }

    fn node(agent: &Agent, code: &str) -> Option<Self> {
        Self::start(agent, "node", &["-e", code])
    }

    fn ask(&mut self) -> String {
        self.stdin.write_all(b"\n").unwrap();
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "it ended");
        line
    }

    /// Ends its input; whether it then ended well.
    fn end(self) -> bool {
        let Self { mut child, stdin, stdout: _stdout } = self;
        drop(stdin);
        child.wait().unwrap().success()
    }
}

const PYTHON: &str = "
import random, sys
for line in sys.stdin:
    print([random.random() for _ in range(3)], flush=True)
";

const NODE: &str = "
require('node:readline').createInterface({ input: process.stdin }).on('line', () => {
  console.log(JSON.stringify([0, 1, 2].map(() => Math.random())));
});
";

fn two_runtimes_differ_but_by_their_seeds(start: impl Fn(&Agent) -> Option<Runtime>) {
    let mut agent = Agent::new();
    let Some(mut one) = start(&agent) else { return };
    let mut two = start(&agent).unwrap();
    assert_ne!(one.ask(), two.ask());

    assert_eq!(agent.reseed(1), 2);
    let (first, second) = (one.ask(), two.ask());
    assert_eq!(first, second, "the same seed must give the same numbers, or it was not taken");
    assert_ne!(one.ask(), first);
    let _ = two.ask();

    assert_eq!(agent.reseed(2), 2);
    assert_ne!(one.ask(), first, "another seed must give others");
    let _ = two.ask();
    assert_eq!(agent.reseed(1), 2);
    assert_eq!([one.ask(), two.ask()], [first.clone(), first]);

    assert!(one.end(), "the hook must not keep it from ending");
    assert_eq!(agent.reseed(3), 1, "who has ended does not count");
    assert!(two.end());
}

#[test]
fn python_s_random_takes_the_seed() {
    two_runtimes_differ_but_by_their_seeds(|agent| Runtime::python(agent, PYTHON));
}

#[test]
fn node_s_math_random_takes_the_seed() {
    two_runtimes_differ_but_by_their_seeds(|agent| Runtime::node(agent, NODE));
}

#[test]
fn a_forked_python_registers_for_itself() {
    let mut agent = Agent::new();
    let code = "
import os, random, sys
ours, theirs = os.pipe()
if os.fork() == 0:
    os.close(theirs)
    os.write(1, b'up\\n')
    os.read(ours, 1)
    print(random.random(), flush=True)
    os._exit(0)
for line in sys.stdin:
    print(random.random(), flush=True)
    os.write(theirs, b'x')
    os.wait()
";
    let Some(mut python) = Runtime::python(&agent, code) else { return };
    let mut up = String::new();
    python.stdout.read_line(&mut up).unwrap();
    assert_eq!(agent.reseed(5), 2);
    let parent = python.ask();
    let mut child = String::new();
    python.stdout.read_line(&mut child).unwrap();
    assert_eq!(parent, child);
    assert!(python.end());
}

#[test]
fn python_without_random_or_an_agent_is_left_alone() {
    let mut agent = Agent::new();
    let code = "
import sys
assert 'socket' not in sys.modules
assert not any('stasis' in entry for entry in sys.path), sys.path
for line in sys.stdin:
    import random
    print(random.random(), flush=True)
";
    let Some(mut python) = Runtime::python(&agent, code) else { return };
    let first = python.ask();
    assert_eq!(agent.reseed(1), 1);
    assert_ne!(python.ask(), first);
    assert!(python.end());
    agent.path = "/nonexistent".into();
    let mut alone = Runtime::python(&agent, PYTHON).unwrap();
    assert_ne!(alone.ask(), alone.ask());
    assert!(alone.end());
}

#[test]
fn another_sitecustomize_still_runs() {
    let agent = Agent::new();
    let theirs = tempfile::tempdir().unwrap();
    std::fs::write(theirs.path().join("sitecustomize.py"), "import sys; sys.theirs = __file__\n").unwrap();
    let ours = overlay("usr/lib/stasis/python");
    let path = format!("{}:{}", ours.display(), theirs.path().display());
    let output = Command::new("python3")
        .args(["-c", "import sys; print('stasis_hook' in sys.modules, sys.theirs)"])
        .env("PYTHONPATH", path)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("STASIS_HOOK_SOCKET", &agent.path)
        .output();
    let Ok(output) = output else { return eprintln!("SKIPPED: no python3 on this machine") };
    let expected = format!("True {}/sitecustomize.py\n", theirs.path().display());
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn node_s_crypto_keeps_its_contract_after_a_reseed() {
    let mut agent = Agent::new();
    let code = r"
const assert = require('node:assert');
const crypto = require('node:crypto');
async function check() {
  const uuid = /^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/;
  assert.match(crypto.randomUUID(), uuid);
  assert.match(crypto.webcrypto.randomUUID(), uuid);
  assert.notStrictEqual(crypto.randomUUID(), crypto.randomUUID());
  assert.strictEqual(crypto.randomBytes(33).length, 33);
  assert.notDeepStrictEqual(crypto.randomBytes(16), crypto.randomBytes(16));
  assert.throws(() => crypto.randomBytes(-1), { code: 'ERR_OUT_OF_RANGE' });
  const later = (name, ...args) => new Promise((done, fail) =>
    crypto[name](...args, (error, value) => error ? fail(error) : done(value)));
  assert.strictEqual((await later('randomBytes', 5)).length, 5);
  const filled = crypto.randomFillSync(Buffer.alloc(64), 16, 32);
  assert(filled.subarray(0, 16).every((b) => b === 0) && filled.subarray(48).every((b) => b === 0));
  assert(filled.subarray(16, 48).some((b) => b !== 0));
  const words = await later('randomFill', new Uint32Array(8), 4);
  assert(words.subarray(0, 4).every((w) => w === 0) && words.subarray(4).some((w) => w !== 0));
  assert(new Uint8Array(crypto.randomFillSync(new ArrayBuffer(16))).some((b) => b !== 0));
  for (let i = 0; i < 100; i++) {
    const n = crypto.randomInt(-3, 4);
    assert(Number.isInteger(n) && n >= -3 && n < 4);
  }
  assert(await later('randomInt', 10) < 10);
  assert.throws(() => crypto.randomInt(5, 2));
  const values = new Uint16Array(32);
  assert.strictEqual(crypto.webcrypto.getRandomValues(values), values);
  assert(values.some((v) => v !== 0));
  if (crypto.getRandomValues) assert.strictEqual(crypto.getRandomValues(values), values);
  assert.throws(() => crypto.webcrypto.getRandomValues(new Uint8Array(65537)));
  const { randomUUID } = await import('node:crypto');
  assert.match(randomUUID(), uuid);
  let sum = 0;
  for (let i = 0; i < 100000; i++) { const r = Math.random(); assert(r >= 0 && r < 1); sum += r; }
  assert(Math.abs(sum / 100000 - 0.5) < 0.01);
}
require('node:readline').createInterface({ input: process.stdin }).on('line', () => {
  check().then(() => console.log('good'), (error) => { console.error(error); process.exit(1); });
});
";
    let Some(mut node) = Runtime::node(&agent, code) else { return };
    assert_eq!(node.ask(), "good\n");
    assert_eq!(agent.reseed(1), 1);
    assert_eq!(node.ask(), "good\n");
    assert!(node.end());
}

#[test]
fn node_s_workers_register_too() {
    let mut agent = Agent::new();
    let code = r"
const { Worker } = require('node:worker_threads');
const worker = new Worker(`
  require('node:worker_threads').parentPort.on('message', () =>
    require('node:worker_threads').parentPort.postMessage(Math.random()));
`, { eval: true });
worker.on('online', () => console.log('up'));
worker.on('message', (value) => console.log(value, Math.random()));
require('node:readline').createInterface({ input: process.stdin })
  .on('line', () => worker.postMessage(0))
  .on('close', () => worker.terminate());
";
    let Some(mut node) = Runtime::node(&agent, code) else { return };
    let mut up = String::new();
    node.stdout.read_line(&mut up).unwrap();
    assert_eq!(agent.reseed(9), 2);
    let line = node.ask();
    let (worker, main) = line.trim().split_once(' ').unwrap();
    assert_eq!(worker, main);
    assert!(node.end());
}
