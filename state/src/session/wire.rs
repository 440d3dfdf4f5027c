//! What goes into a session, and what comes out.

use std::time::Duration;

use crate::{Event, Hold, Lifetime, Name, Record, State, Timestamp};

/// One request, or one command, as its owner counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// The rules by which a session decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Those of its sandbox.
    pub lifetime: Lifetime,
    /// How long requests may go on behind the deadline of a sandbox that is then paused, before they are cut.
    pub grace: Duration,
    /// After how long something that failed is tried again.
    pub retry: Duration,
}

/// What happens to a session.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// A request has come. It is answered by [`Action::Admit`] or [`Action::Refuse`], once.
    Came(RequestId),
    /// A request is over, or its caller has left, be it while it waited. Also the answer to [`Action::Cut`].
    Over(RequestId),
    /// Somebody has a foreground command run. It comes and ends as a request does, but is told apart from those where the session says what
    /// keeps it awake.
    Command(RequestId),
    /// Somebody holds the sandbox; the record has it already.
    Hold(Hold),
    /// A hold is released; the record has it already.
    Release(Name),
    /// The deadline was moved; the record has it already.
    Deadline(Option<Timestamp>),
    /// Somebody wants it paused, whatever holds it. Requests in it may go on for so long before they are cut.
    Pause {
        /// How long.
        grace: Duration,
    },
    /// Somebody wants it to run.
    Resume,
    /// Memory is short: if it is suspended, it shall be hibernated.
    Hibernate,
    /// Somebody wants it removed.
    Kill,
    /// [`Session::wake_at`](super::Session::wake_at) has come.
    Timer,
    /// The store has taken what [`Action::Write`] asked for.
    Written {
        /// The record's deadline as it is now ([`Record::ends_at`]).
        deadline: Option<Timestamp>,
    },
    /// The store could not be written.
    NotWritten,
    /// The store has refused the write: the record is in another state than this session left it in, or gone. Somebody kills it, or
    /// another node owns it. Whoever hears of a kill by a notice gives [`Input::Kill`] instead.
    Superseded(State),
    /// What [`Action::Do`] asked for was done.
    Did,
    /// It was not, and that has changed nothing, or nothing can be said of it.
    DidNot,
    /// The VM's process has ended by itself.
    Ended,
}

impl Input {
    /// What tells a session that the store has taken its write.
    #[must_use]
    pub fn written(record: &Record) -> Self {
        Self::Written { deadline: record.ends_at() }
    }
}

/// What a session asks its owner to do. At most one [`Action::Write`] or [`Action::Do`] is outstanding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Let a request in. The VM runs, and is not paused before the request is over.
    Admit(RequestId),
    /// Answer a request with why it cannot be let in.
    Refuse(RequestId, Refusal),
    /// End a request that is in, for this reason: its time is over, or the sandbox is removed. [`Input::Over`] follows.
    Cut(RequestId, Refusal),
    /// Write this event to the record, expecting what was written before. [`Input::Written`], [`Input::NotWritten`] or
    /// [`Input::Superseded`] follows. If only facts of the record have changed meanwhile, read it and write again.
    Write(Event),
    /// Do this. [`Input::Did`] or [`Input::DidNot`] follows.
    Do(Work),
    /// Give up the [`Work::Save`] that is under way if that is quicker than ending it: somebody waits. It is
    /// still answered, and may be asked more than once.
    Hurry,
}

/// What is done to a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Make it and let it run.
    Create,
    /// Stop its vCPUs.
    Stop,
    /// Let its vCPUs run, if they do not.
    Go,
    /// Write its memory to disk, all of it, over what is left of an earlier attempt, and keep it in RAM.
    Save,
    /// Make it from what was saved, whatever is left of an earlier attempt, and let it run.
    Restore,
    /// Free its process and memory, if there are any; keep what was saved.
    Release,
    /// Remove all of it.
    Destroy,
}

/// Why a request is not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It is paused, and only a person resumes it.
    #[error("the sandbox is paused, and requests do not resume it: resume it first")]
    Paused,
    /// It is being removed, or was.
    #[error("the sandbox was killed")]
    Killed,
    /// Its VM ended.
    #[error("the sandbox has failed: look at its record for the reason, and make a new one")]
    Failed,
    /// It could not be brought back now; it is on disk as before.
    #[error("the sandbox could not be brought back now: try again")]
    NotResumed,
    /// The store cannot be written.
    #[error("the store cannot be written, so the sandbox cannot be brought back now: try again")]
    Store,
    /// Another node owns it.
    #[error("the sandbox has moved to another node: ask again")]
    Moved,
}
