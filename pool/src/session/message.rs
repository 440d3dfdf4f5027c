//! What a sandbox's task is told, and how it answers.

use std::{sync::Arc, time::Duration};

use stasis_pool_api::{Hold, Name, PauseTo, SandboxError, SandboxInfo, SandboxLogs};
use stasis_state::{Process, Record, RequestId};
use tokio::sync::oneshot;

use super::{
    machine::Moment,
    visit::{Opening, Visit},
};

/// An answer to whoever asked, who may have left.
pub(super) type Reply<T> = oneshot::Sender<Result<T, SandboxError>>;

pub(super) enum Message {
    /// A request has come, which may wait so long. It is over when what it gets is dropped.
    Visit(RequestId, Opening, Duration, Reply<Visit>),
    /// A request is over.
    Over(RequestId),
    Pause(PauseTo, Reply<SandboxInfo>),
    Resume(RequestId, Option<Duration>, Reply<(SandboxInfo, bool)>),
    Timeout(Duration, Reply<SandboxInfo>),
    Hold(Hold, Reply<SandboxInfo>),
    Release(Name, Reply<SandboxInfo>),
    Kill(Reply<SandboxInfo>),
    /// A moment of it, for so many others to be made of within a time.
    Fork(u32, Duration, Reply<Origin>),
    Inspect(oneshot::Sender<SandboxInfo>),
    /// What it has said last.
    Logs(Reply<SandboxLogs>),
    /// The node is full: it shall give up its own if it is suspended.
    Spare,
    /// The node stops, and it shall be on disk by then.
    Save(Reply<SandboxInfo>),
    /// The node stops, and its VM goes on without: once what is being done to it has ended. Tells the process, if there is one.
    Leave(oneshot::Sender<Option<Process>>),
    /// The same, at once.
    LeaveNow,
}

/// What a sandbox is made from.
#[derive(Debug, Clone)]
pub(super) enum Source {
    /// Its template's pool, which it may wait for so long.
    Pool(Duration),
    /// A moment of another.
    Moment(Arc<Moment>),
}

/// What the children of a sandbox have from it.
#[derive(Debug)]
pub(super) struct Origin {
    pub(super) moment: Arc<Moment>,
    pub(super) record: Record,
}

/// What somebody waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Goal {
    /// It runs for the first time.
    Started,
    /// It does not run.
    Paused,
    /// It is on disk.
    Saved,
    /// Nothing of it is left.
    Gone,
}

impl Goal {
    /// What is wanted of the sandbox.
    pub(super) const fn in_words(self) -> &'static str {
        match self {
            Self::Started => "start",
            Self::Paused => "be paused",
            Self::Saved => "be hibernated",
            Self::Gone => "be removed",
        }
    }
}

pub(super) struct Watcher {
    pub(super) goal: Goal,
    pub(super) reply: Reply<SandboxInfo>,
}
