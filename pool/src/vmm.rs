//! The handle of one VMM process.
//!
//! ```text
//!  spawn ─────────────────────────▶ connected ──requests, events──▶ … ──handle dropped, or process gone──▶ killed and reaped
//!  kept, and its node gone ─ greet, take ──▶ ▲                      └─ told to leave, then dropped ──▶ it goes on
//! ```
//!
//! A task owns the control socket and the process. Dropping the last handle makes it kill the process and wait for its end; only
//! then is the VM's memory given back. One that is kept outlives its node all the same: if that is killed, and if it leaves.

#[cfg(test)]
pub(crate) mod fake;
mod footprint;
mod later;
mod place;
pub(crate) mod process;
mod spawner;
#[cfg(test)]
pub(crate) mod tests;
mod trial;
mod uids;
pub(crate) mod wire;

use std::{
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use stasis_state::Process;
use stasis_vmm_api::{Event, FromVmm, MachineSpec, Reply, Request, Stop};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_seqpacket::UnixSeqpacket;

use self::later::{Awaits, Later};
pub use self::trial::try_jail;
pub(crate) use self::{
    footprint::Footprint,
    place::Place,
    process::{Born, Holder},
    spawner::{Role, Spawner},
    uids::Lease,
};

use crate::admission::{Promise, Reservation};

/// Longest time that a kept VM's process may take to answer its next owner: it finishes what it was doing first, and saving a large guest on a
/// busy disk takes seconds.
const ADOPTION_LIMIT: Duration = Duration::from_secs(60);

/// Why a request to a VMM process was not answered with what was asked for.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum VmmError {
    /// The process could not be started.
    #[error("the VMM process cannot be started: {0}")]
    Spawn(String),
    /// The process has ended.
    #[error("the VMM process has ended{0}")]
    Gone(String),
    /// The snapshot was made on a host with other traits.
    #[error("{0}")]
    Incompatible(String),
    /// The process refused.
    #[error("{0}")]
    Failed(String),
    /// The process answered something else.
    #[error("the VMM process answered {0:?}")]
    Protocol(Box<Reply>),
}

/// How a guest ended.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) why: Stop,
    pub(crate) console: String,
}

/// What is known of the process from outside.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fate {
    pub(crate) guest: Option<Ended>,
    pub(crate) process_gone: bool,
}

/// A VMM process.
#[derive(Debug)]
pub(crate) struct Vmm {
    requests: mpsc::Sender<Call>,
    fate: watch::Receiver<Fate>,
    holder: Holder,
    /// Where it is found again, if it is kept.
    kept: Arc<OnceLock<Place>>,
    /// It is to go on without this node when the last handle is dropped.
    leaving: Arc<AtomicBool>,
    promise: Promise,
}

/// A kept VM's process that has answered its next owner.
#[derive(Debug)]
pub(crate) struct Greeted {
    socket: UnixSeqpacket,
    /// Its vCPUs run.
    pub(crate) running: bool,
    /// What it was kept with.
    pub(crate) files: Vec<OwnedFd>,
}

struct Call {
    request: Request,
    files: Vec<OwnedFd>,
    answer: Answer,
}

/// Where what comes of a request is told.
struct Answer {
    reply: oneshot::Sender<Reply>,
    /// What the reply says will follow.
    awaits: Option<Awaits>,
}

/// Streams that the guest opens to ports of the host.
pub(crate) type GuestStreams = mpsc::Receiver<(u32, UnixStream)>;

impl Drop for Vmm {
    fn drop(&mut self) {
        // The task that owns the process ends it now, and gives the memory back when it has ended.
        self.promise.is_leaving();
    }
}

impl Vmm {
    /// Starts a process for `machine`. `reservation` is given back when it has ended.
    pub(crate) async fn spawn(
        spawner: &Spawner,
        machine: &MachineSpec,
        reservation: Reservation,
    ) -> Result<(Self, GuestStreams), VmmError> {
        let failed = |error: io::Error| VmmError::Spawn(error.to_string());
        let (ours, theirs) = UnixSeqpacket::pair().map_err(failed)?;
        let (spawner, machine) = (spawner.clone(), machine.clone());
        // In a task of its own: when the caller leaves, a process that is half born still has an owner, which waits for its end.
        let born = tokio::spawn(async move {
            let born = spawner.spawn(Role::Vmm, &machine, theirs.into()).await?;
            let holder = born.holder().map_err(failed)?;
            Ok(Self::over(ours, Some(born), holder, OnceLock::new(), reservation))
        });
        born.await.map_err(|error| failed(error.into()))?
    }

    /// Comes as its next owner to a kept VM that another node has left at `place`. Whoever leaves meanwhile leaves it as it was.
    pub(crate) async fn greet(place: &Place) -> Result<Greeted, VmmError> {
        match tokio::time::timeout(ADOPTION_LIMIT, greet(place)).await {
            Ok(answer) => answer,
            Err(_) => {
                Err(VmmError::Failed(format!("its VM has not answered its next owner within {ADOPTION_LIMIT:?}")))
            }
        }
    }

    /// The handle of a kept VM that has answered; and the files that it was kept with.
    pub(crate) fn take(
        greeted: Greeted,
        place: Place,
        holder: Holder,
        process: Option<Born>,
        reservation: Reservation,
    ) -> (Self, Vec<OwnedFd>) {
        let (vmm, _) = Self::over(greeted.socket, process, holder, OnceLock::from(place), reservation);
        (vmm, greeted.files)
    }

    /// The handle of whoever is at the other end of `socket`, and of the process behind it.
    fn over(
        socket: UnixSeqpacket,
        process: Option<Born>,
        holder: Holder,
        kept: OnceLock<Place>,
        reservation: Reservation,
    ) -> (Self, GuestStreams) {
        let (kept, leaving) = (Arc::new(kept), Arc::<AtomicBool>::default());
        let promise = reservation.promise();
        let (requests, calls) = mpsc::channel(8);
        let (fate_tx, fate) = watch::channel(Fate::default());
        let (streams_tx, streams) = mpsc::channel(4);
        let task = Task {
            socket,
            process,
            kept: Arc::clone(&kept),
            leaving: Arc::clone(&leaving),
            fate: fate_tx,
            streams: streams_tx,
            pending: Default::default(),
            later: Later::default(),
        };
        tokio::spawn(async move {
            let told = task.run(calls).await;
            drop(reservation);
            drop(told);
        });
        (Self { requests, fate, holder, kept, leaving, promise }, streams)
    }

    /// The process id.
    pub(crate) fn pid(&self) -> u32 {
        self.holder.process.pid
    }

    /// The process, which no later one can be mistaken for.
    pub(crate) fn process(&self) -> Process {
        self.holder.process
    }

    /// What the process is found again by.
    pub(crate) fn holder(&self) -> &Holder {
        &self.holder
    }

    /// From now on it outlives this process, should that be killed: it is found at `place`, which goes when it ends, and gives `files` to its next
    /// owner.
    pub(crate) async fn keep(&self, place: Place, files: Vec<OwnedFd>) -> Result<(), VmmError> {
        let listener = place.listen();
        // Also removed should this fail: the VM is of no use then.
        let place = self.kept.get_or_init(|| place);
        let listener = listener.map_err(|error| {
            VmmError::Failed(format!("no socket can be made in {}: {error}", place.path().display()))
        })?;
        self.order(Request::Keep, [listener].into_iter().chain(files).collect()).await
    }

    /// When the last handle is dropped it goes on without this node, if it is kept: the next one finds it as it is then.
    pub(crate) fn leave(&self) {
        self.leaving.store(true, Relaxed);
    }

    /// What the node has promised it.
    pub(crate) fn promise(&self) -> &Promise {
        &self.promise
    }

    /// The guest and its process are running or paused.
    pub(crate) fn is_alive(&self) -> bool {
        let fate = self.fate.borrow();
        fate.guest.is_none() && !fate.process_gone
    }

    /// Waits until the guest or the process has ended.
    pub(crate) async fn ended(&self) -> Fate {
        self.end().await
    }

    /// As `ended`, without keeping the process.
    pub(crate) fn end(&self) -> impl Future<Output = Fate> + Send + 'static {
        let mut fate = self.fate.clone();
        async move {
            match fate.wait_for(|fate| fate.guest.is_some() || fate.process_gone).await {
                Ok(fate) => fate.clone(),
                Err(_) => Fate { guest: None, process_gone: true },
            }
        }
    }

    /// Waits until the process has ended and its memory is given back. The handle must be dropped meanwhile, or it would not end.
    pub(crate) fn reaped(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut fate = self.fate.clone();
        // The task that owns the process drops its end last.
        async move { while fate.changed().await.is_ok() {} }
    }

    /// Sends a request and waits for its answer.
    pub(crate) async fn call(&self, request: Request, files: Vec<OwnedFd>) -> Result<Reply, VmmError> {
        self.start(request, files).await?.wait().await
    }

    /// Sends a request; the answer may be waited for later. Requests are carried out in order.
    pub(crate) async fn start(&self, request: Request, files: Vec<OwnedFd>) -> Result<Pending<'_>, VmmError> {
        self.begin(request, files, None).await
    }

    async fn begin(
        &self,
        request: Request,
        files: Vec<OwnedFd>,
        awaits: Option<Awaits>,
    ) -> Result<Pending<'_>, VmmError> {
        let (reply, answer) = oneshot::channel();
        let call = Call { request, files, answer: Answer { reply, awaits } };
        self.requests.send(call).await.map_err(|_| self.gone())?;
        Ok(Pending { vmm: self, answer })
    }

    /// As `call`, for requests that are answered with `Done`.
    pub(crate) async fn order(&self, request: Request, files: Vec<OwnedFd>) -> Result<(), VmmError> {
        self.start(request, files).await?.done().await
    }

    /// As `order`, without keeping the process: whoever waits for it does not have it live longer.
    pub(crate) fn order_apart(
        &self,
        request: Request,
        files: Vec<OwnedFd>,
    ) -> impl Future<Output = Result<(), VmmError>> + Send + use<> {
        let (requests, fate) = (self.requests.downgrade(), self.fate.clone());
        async move {
            let (reply, answer) = oneshot::channel();
            let call = Call { request, files, answer: Answer { reply, awaits: None } };
            let sent = match requests.upgrade() {
                Some(requests) => requests.send(call).await.is_ok(),
                None => false,
            };
            let answer = if sent { answer.await.ok() } else { None };
            is_done(told(answer.ok_or_else(|| gone(&fate.borrow()))?)?)
        }
    }

    /// The console's tail, as well as it can be had.
    pub(crate) async fn console(&self) -> String {
        if let Some(ended) = &self.fate.borrow().guest {
            return ended.console.clone();
        }
        match self.call(Request::Console, Vec::new()).await {
            Ok(Reply::Console { tail }) => tail,
            Ok(other) => format!("(no console: {})", VmmError::Protocol(Box::new(other))),
            Err(error) => format!("(no console: {error})"),
        }
    }

    fn gone(&self) -> VmmError {
        gone(&self.fate.borrow())
    }
}

fn gone(fate: &Fate) -> VmmError {
    VmmError::Gone(fate.guest.as_ref().map(|ended| format!(": {}", ended.why)).unwrap_or_default())
}

fn told(reply: Reply) -> Result<Reply, VmmError> {
    match reply {
        Reply::Incompatible { reason } => Err(VmmError::Incompatible(reason)),
        Reply::Failed { reason } => Err(VmmError::Failed(reason)),
        reply => Ok(reply),
    }
}

fn is_done(reply: Reply) -> Result<(), VmmError> {
    match reply {
        Reply::Done => Ok(()),
        other => Err(VmmError::Protocol(Box::new(other))),
    }
}

/// An answer that is awaited.
pub(crate) struct Pending<'a> {
    vmm: &'a Vmm,
    answer: oneshot::Receiver<Reply>,
}

impl Pending<'_> {
    pub(crate) async fn wait(self) -> Result<Reply, VmmError> {
        match self.answer.await {
            Ok(reply) => told(reply),
            Err(_) => Err(self.vmm.gone()),
        }
    }

    pub(crate) async fn done(self) -> Result<(), VmmError> {
        is_done(self.wait().await?)
    }
}

/// Comes to a kept VM as its next owner.
async fn greet(place: &Place) -> Result<Greeted, VmmError> {
    let failed = |error: io::Error| VmmError::Failed(format!("it cannot be reached: {error}"));
    let socket = place.connect().await.map_err(failed)?;
    wire::send(&socket, &Request::Adopt, &[]).await.map_err(failed)?;
    match wire::receive(&socket, &mut wire::Buffers::default()).await.map_err(failed)? {
        Some((FromVmm::Reply(Reply::Adopted { running }), files)) => Ok(Greeted { socket, running, files }),
        Some((FromVmm::Reply(Reply::Failed { reason }), _)) => Err(VmmError::Failed(reason)),
        Some((FromVmm::Reply(reply), _)) => Err(VmmError::Protocol(Box::new(reply))),
        Some((FromVmm::Event(event), _)) => Err(VmmError::Failed(format!("it answered with an event: {event:?}"))),
        None => Err(VmmError::Gone(String::new())),
    }
}

/// Ends a process, and then what it was to be found by.
pub(crate) async fn end(process: &mut Option<Born>, place: Option<&Place>) {
    if let Some(process) = process
        && let Err(error) = process.end().await
    {
        // It may live, and must be found by the next start.
        return tracing::error!(%error, "a VMM process cannot be ended");
    }
    if let Some(place) = place {
        place.remove();
    }
}

struct Task {
    socket: UnixSeqpacket,
    process: Option<Born>,
    kept: Arc<OnceLock<Place>>,
    leaving: Arc<AtomicBool>,
    fate: watch::Sender<Fate>,
    streams: mpsc::Sender<(u32, UnixStream)>,
    pending: std::collections::VecDeque<Answer>,
    later: Later,
}

impl Task {
    /// Returns what tells of its end, for whoever waits until the memory is given back.
    async fn run(mut self, mut calls: mpsc::Receiver<Call>) -> watch::Sender<Fate> {
        let mut buffers = wire::Buffers::default();
        loop {
            tokio::select! {
                call = calls.recv() => {
                    let Some(Call { request, files, answer }) = call else {
                        if self.leaving.load(Relaxed) && self.kept.get().is_some() {
                            if let Some(process) = self.process.take() {
                                process.leave();
                            }
                            return self.fate;
                        }
                        break;
                    };
                    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                    match wire::send(&self.socket, &request, &files).await {
                        Ok(()) => self.pending.push_back(answer),
                        // Over the packet's limit, or the process is gone (which the other branch will see).
                        Err(error) => drop(answer.reply.send(Reply::Failed { reason: format!("cannot ask the VMM process: {error}") })),
                    }
                }
                received = wire::receive(&self.socket, &mut buffers) => match received {
                    Ok(Some((message, files))) => self.handle(message, files),
                    Ok(None) => break,
                    Err(error) => {
                        tracing::error!(pid = self.process.as_ref().and_then(Born::pid), %error, "the VMM process broke the protocol");
                        break;
                    }
                }
            }
        }
        self.fate.send_modify(|fate| fate.process_gone = true);
        self.pending.clear();
        self.later = Later::default();
        end(&mut self.process, self.kept.get()).await;
        self.fate
    }

    fn handle(&mut self, message: FromVmm, mut files: Vec<OwnedFd>) {
        match message {
            FromVmm::Reply(reply) => {
                let Some(answer) = self.pending.pop_front() else { return };
                self.later.replied(&reply, answer.awaits);
                drop(answer.reply.send(reply)); // nobody may be waiting for it any more
            }
            FromVmm::Event(Event::Stopped { why, console }) => {
                self.fate.send_modify(|fate| fate.guest = Some(Ended { why, console }));
            }
            FromVmm::Event(Event::Rests) => self.later.rests(),
            FromVmm::Event(Event::Answered { text }) => self.later.answered(text),
            FromVmm::Event(Event::LiveSnapshot(report)) => self.later.live_ended(Ok(report)),
            FromVmm::Event(Event::LiveSnapshotFailed { reason }) => self.later.live_ended(Err(reason)),
            FromVmm::Event(Event::GuestConnected { port }) => {
                // Dropping the stream refuses the connection: nobody waits for it, or too many are waiting already.
                if let Some(stream) = files.pop() {
                    drop(self.streams.try_send((port, stream.into())));
                }
            }
        }
    }
}
