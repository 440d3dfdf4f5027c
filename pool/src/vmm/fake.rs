//! A VMM "process" without a VM, for tests of the state machines: it answers requests, and plays the agent on every connection.

use std::{
    collections::BTreeMap,
    os::{fd::OwnedFd, unix::net::UnixStream as StdUnixStream},
    sync::{
        Arc, LazyLock, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use stasis_guest_wire::exec::{Exec, Part};
use stasis_guest_wire::wake::{Certificate, FromAgent, FromNode, Proof, Step, Wake};
use stasis_state::Process;
use stasis_vmm_api::{Event, FromVmm, MAX_FDS, MAX_PACKET, Reply, Request, RewindReport};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    runtime::Handle,
    sync::{Notify, watch},
};
use tokio_seqpacket::{
    UnixSeqpacket, UnixSeqpacketListener,
    ancillary::{AncillaryMessageWriter, OwnedAncillaryMessage},
};

use super::{Born, GuestStreams, Holder, Vmm, uids::Uids};
use crate::{admission::Reservation, agent};

const ZERO: Duration = Duration::ZERO;
/// How long one that stops late takes.
const LATE: Duration = Duration::from_secs(5);
/// After how long a function tires.
const PATIENCE: Duration = Duration::from_secs(60);

/// Fakes are told apart by process ids that no process has.
static NEXT_PID: AtomicU32 = AtomicU32::new(1 << 30);

/// How the fake's agent behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Agent {
    /// Proves everything.
    Honest,
    /// Refuses at this step.
    Refuses(Step),
    /// Leaves out the proof of this step.
    Omits(Step),
    /// Was booted, not restored.
    Booted,
    /// The VM's process ends as soon as the guest runs.
    Dies,
    /// Never answers.
    Silent,
    /// Its vCPUs take a while to stop.
    StopsLate,
    /// Its VM cannot be rewound.
    KeepsTraces,
    /// Proves everything; the function says hello when it is asked.
    Polite,
    /// Proves everything; the function closes every connection at once, and so does the agent when it is told of a command.
    HangsUp,
    /// Proves everything; it runs no commands.
    Bare,
    /// As polite, but once it is awake the guest answers nothing any more.
    Freezes,
    /// Proves everything; the function answers each request, a number, with the same, and it is written down ([`SERVED`]).
    Counts,
    /// Waits at a wake page, and proves everything there.
    Prompt,
    /// Waits at a wake page, and leaves there what is no answer.
    Babbles,
    /// As polite, but the function closes the first connection when nothing has come over it for a while.
    Tires,
}

/// How often each request was answered by a fake that counts, and whether its VM stood still then.
pub(crate) static SERVED: Mutex<BTreeMap<u64, (u32, bool)>> = Mutex::new(BTreeMap::new());

/// Those that live.
static LIVING: Mutex<BTreeMap<u32, Switch>> = Mutex::new(BTreeMap::new());
static UIDS: LazyLock<Uids> = LazyLock::new(|| Uids::new(1 << 30));

/// Ends a fake, as the kernel does a process that is killed.
#[derive(Debug, Clone)]
pub(crate) struct Switch {
    pub(crate) pid: u32,
    kill: Arc<Notify>,
    ended: watch::Sender<bool>,
    stopped: watch::Sender<bool>,
}

impl Switch {
    pub(crate) async fn end(&self) {
        self.kill.notify_one();
        self.ended.subscribe().wait_for(|ended| *ended).await.unwrap();
    }
}

/// Has a fake that lives take no owner, as one that is sent SIGSTOP, or take one again.
pub(crate) fn stop(pid: u32, stopped: bool) {
    LIVING.lock().unwrap()[&pid].stopped.send_replace(stopped);
}

/// The "process" of a fake that lives.
pub(crate) fn born(pid: u32) -> Option<Born> {
    let switch = LIVING.lock().unwrap().get(&pid).cloned()?;
    Some(Born::fake(switch, UIDS.take().unwrap()))
}

/// A handle whose other end is a task of this process. What the "function" says first is `hello`.
pub(crate) fn start(agent: Agent, reservation: Reservation) -> (Vmm, GuestStreams) {
    start_in(&Handle::current(), agent, reservation)
}

/// The same, in another runtime than whoever has the handle: it can outlive that.
pub(crate) fn start_in(world: &Handle, agent: Agent, reservation: Reservation) -> (Vmm, GuestStreams) {
    let (ours, theirs) = UnixSeqpacket::pair().unwrap();
    let theirs = OwnedFd::from(theirs);
    let pid = NEXT_PID.fetch_add(1, Ordering::Relaxed);
    let switch =
        Switch { pid, kill: Arc::default(), ended: watch::Sender::new(false), stopped: watch::Sender::new(false) };
    LIVING.lock().unwrap().insert(pid, switch.clone());
    world.spawn(async move {
        tokio::select! {
            () = switch.kill.notified() => {}
            () = live(theirs.try_into().unwrap(), agent, switch.stopped.subscribe()) => {}
        }
        LIVING.lock().unwrap().remove(&pid);
        switch.ended.send_replace(true);
    });
    let holder = Holder { process: Process { pid, started: 0 }, uid: pid, group: None };
    Vmm::over(ours, born(pid), holder, OnceLock::new(), reservation)
}

/// What a VM that is kept is kept with.
struct Kept {
    listener: UnixSeqpacketListener,
    files: Vec<OwnedFd>,
}

/// What outlives an owner.
struct State {
    kept: Option<Kept>,
    running: Arc<AtomicBool>,
}

async fn live(mut socket: UnixSeqpacket, behaviour: Agent, mut stopped: watch::Receiver<bool>) {
    // A pool's stands still; what a sandbox has of it runs.
    let mut state = State { kept: None, running: Arc::new(AtomicBool::new(true)) };
    loop {
        serve(&socket, behaviour, &mut state).await;
        let Some(kept) = &mut state.kept else { return };
        stopped.wait_for(|stopped| !stopped).await.unwrap();
        socket = kept.listener.accept().await.unwrap();
    }
}

/// Until its owner leaves.
async fn serve(socket: &UnixSeqpacket, behaviour: Agent, state: &mut State) {
    let mut packet = vec![0; MAX_PACKET];
    let mut order = None;
    loop {
        let (mut given, mut resumed) = (Vec::new(), false);
        let mut space = [0; 64 + MAX_FDS * 4];
        let mut parts = [std::io::IoSliceMut::new(&mut packet)];
        let Ok((info, ancillary)) = socket.recv_vectored_with_ancillary(&mut parts, &mut space).await else { return };
        let mut files: Vec<OwnedFd> = Vec::new();
        for message in ancillary.into_messages() {
            if let OwnedAncillaryMessage::FileDescriptors(descriptors) = message {
                files.extend(descriptors);
            }
        }
        if info.bytes_read() == 0 {
            return;
        }
        let reply = match serde_json::from_slice(&packet[..info.bytes_read()]).unwrap() {
            Request::Connect { .. } => {
                tokio::spawn(converse(files.remove(0).into(), behaviour, Arc::clone(&state.running)));
                Reply::Done
            }
            Request::Order { text } if matches!(behaviour, Agent::Prompt | Agent::Babbles) => {
                order = Some(text.0);
                Reply::Ordered
            }
            Request::Order { .. } => Reply::NoWakePage,
            Request::Resume if behaviour == Agent::Dies => return,
            Request::Pause if behaviour == Agent::StopsLate => {
                tokio::time::sleep(LATE).await;
                state.running.store(false, Ordering::SeqCst);
                Reply::Done
            }
            request @ (Request::Resume | Request::Pause) => {
                resumed = request == Request::Resume;
                state.running.store(request == Request::Resume, Ordering::SeqCst);
                Reply::Done
            }
            Request::Keep => {
                let listener = UnixSeqpacketListener::try_from(files.remove(0)).unwrap();
                state.kept = Some(Kept { listener, files });
                Reply::Done
            }
            Request::Adopt => {
                given = state.kept.iter().flat_map(|kept| &kept.files).map(|file| file.try_clone().unwrap()).collect();
                Reply::Adopted { running: state.running.load(Ordering::SeqCst) }
            }
            Request::Rewind if behaviour == Agent::KeepsTraces => Reply::Failed { reason: "told to".into() },
            Request::Rewind => Reply::Rewound(RewindReport { dirty_bytes: 4096, memory: ZERO, state: ZERO }),
            Request::Console => Reply::Console { tail: "last words".into() },
            _ => Reply::Done,
        };
        let bytes = serde_json::to_vec(&FromVmm::Reply(reply)).unwrap();
        let mut space = [0; 64 + MAX_FDS * 4];
        let mut ancillary = AncillaryMessageWriter::new(&mut space);
        if !given.is_empty() {
            ancillary.add_fds(&given).unwrap();
        }
        if socket.send_vectored_with_ancillary(&[std::io::IoSlice::new(&bytes)], &mut ancillary).await.is_err() {
            return;
        }
        // It runs, and does what it was ordered.
        let ordered = if resumed { order.take() } else { None };
        if let Some(order) = ordered {
            let answer = match behaviour {
                Agent::Babbles => "done!".into(),
                _ => serde_json::to_string(&answer(serde_json::from_str(&order).unwrap(), behaviour)).unwrap(),
            };
            let event = serde_json::to_vec(&FromVmm::Event(Event::Answered { text: answer })).unwrap();
            if socket.send(&event).await.is_err() {
                return;
            }
        }
    }
}

/// What its agent says to an order.
fn answer(wake: Wake, behaviour: Agent) -> FromAgent {
    let steps = Step::ALL.into_iter().filter(|step| behaviour != Agent::Omits(*step));
    match behaviour {
        Agent::Refuses(step) => FromAgent::Refused { step: Some(step), reason: "told to".into() },
        _ => FromAgent::Awake(Certificate {
            generation: wake.generation,
            kernel_boot_id: if behaviour == Agent::Booted { "another boot" } else { "template's boot" }.into(),
            boot_nonce: wake.boot_nonce,
            hostname: wake.hostname,
            machine_id: wake.machine_id,
            clock_lag_ns: 0,
            runtimes: 0,
            proofs: steps.map(|step| Proof { step, took: ZERO }).collect(),
        }),
    }
}

async fn converse(stream: StdUnixStream, behaviour: Agent, running: Arc<AtomicBool>) {
    stream.set_nonblocking(true).unwrap();
    let mut stream = UnixStream::from_std(stream).unwrap();
    let wake = match agent::receive(&mut stream).await {
        // It was to be left in the page.
        Ok(FromNode::Wake(_)) if matches!(behaviour, Agent::Prompt | Agent::Babbles) => return,
        Ok(FromNode::Wake(wake)) => wake,
        Ok(_) if behaviour == Agent::Freezes => return std::future::pending().await,
        Ok(FromNode::Forward) => {
            if agent::send(&mut stream, &FromAgent::Forwarding).await.is_ok() {
                if behaviour == Agent::Counts {
                    return count(stream, &running).await;
                }
                if matches!(behaviour, Agent::Polite | Agent::Tires) && stream.read_u8().await.is_err() {
                    return;
                }
                // The caller may be gone.
                let _ = stream.write_all(b"hello").await;
                // Open until the caller ends it.
                let _ = stream.read_u8().await;
            }
            return;
        }
        Ok(FromNode::Pass) => {
            // The caller may be gone.
            let _ = stream.write_all(b"hello").await;
            let _ = stream.read_u8().await;
            return;
        }
        Ok(FromNode::Exec(_)) if behaviour == Agent::HangsUp => return,
        Ok(FromNode::Exec(_)) if behaviour == Agent::Bare => {
            // Whoever asked may be gone.
            let _ = agent::send(&mut stream, &FromAgent::NoCommands).await;
            return;
        }
        Ok(FromNode::Exec(exec)) => {
            if agent::send(&mut stream, &FromAgent::Executing).await.is_ok() {
                run(stream, exec).await;
            }
            return;
        }
        Ok(FromNode::Logs) => {
            // Whoever asked may be gone.
            let _ = agent::send(&mut stream, &FromAgent::Logs { output: "ready".into() }).await;
            return;
        }
        Err(_) => return,
    };
    if behaviour == Agent::Silent {
        return std::future::pending().await;
    }
    if agent::send(&mut stream, &answer(wake, behaviour)).await.is_ok() && behaviour != Agent::HangsUp {
        if behaviour == Agent::Tires && tokio::time::timeout(PATIENCE, stream.read_u8()).await.is_err() {
            return;
        }
        if matches!(behaviour, Agent::Polite | Agent::Freezes) && stream.read_u8().await.is_err() {
            return;
        }
        if behaviour == Agent::Freezes {
            return std::future::pending().await;
        }
        // The claimer may be gone.
        let _ = stream.write_all(b"hello").await;
    }
}

/// Answers one request, which takes a while.
async fn count(mut stream: UnixStream, running: &AtomicBool) {
    let Ok(request) = stream.read_u64().await else { return };
    let mut stood_still = !running.load(Ordering::SeqCst);
    for _ in 0..request % 20 {
        tokio::task::yield_now().await;
        stood_still |= !running.load(Ordering::SeqCst);
    }
    let (times, once) =
        *SERVED.lock().unwrap().entry(request).and_modify(|(times, _)| *times += 1).or_insert((1, false));
    SERVED.lock().unwrap().insert(request, (times, once | stood_still));
    // The caller may be gone.
    let _ = stream.write_u64(request).await;
    let _ = stream.read_u8().await;
}

/// `echo` says its input and ends well; anything else says its name, and runs until it is ended.
async fn run(mut stream: UnixStream, exec: Exec) {
    let parts = match exec.command[0].as_str() {
        "echo" => vec![Part::Stdout(exec.stdin.into()), Part::Exited(0)],
        name => vec![Part::Stderr(name.into())],
    };
    for part in parts {
        if stream.write_all(&part.encode().unwrap()).await.is_err() {
            return;
        }
    }
    if exec.command[0] != "echo" {
        let _ = stream.read_u8().await;
    }
}
