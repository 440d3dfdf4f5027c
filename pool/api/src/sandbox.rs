//! Sandboxes: what is asked of a node, and what it shows of them.

use std::{fmt, time::Duration};

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use stasis_state::{Hold, Idle, Metadata, Name, OnTimeout, SandboxId, State, Timestamp};

use crate::{Claim, ClaimError, Command, CommandEvents, NoCapacity, SandboxLogs, TemplateName};

/// Running time of a sandbox that asks for none: E2B's.
const TIMEOUT: Duration = Duration::from_secs(300);
/// How long a sandbox is idle before it is paused, and suspended before its memory goes to disk, if its maker says nothing. Chosen, not
/// measured: a resume from RAM is cheap, one from disk is not.
const IDLE: Duration = Duration::from_secs(60);
const HIBERNATE_AFTER: Duration = Duration::from_secs(600);

/// What a new sandbox shall be. Durations are written as in a template's file: `"90s"`, `"5m"`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewSandbox {
    /// What it is made of.
    pub template: TemplateName,
    /// How long it may run. Time spent paused does not count.
    #[serde(default = "timeout", with = "crate::units::time")]
    pub timeout: Duration,
    /// What its deadline does.
    #[serde(default = "on_timeout")]
    pub on_timeout: OnTimeout,
    /// Whether any request resumes it.
    #[serde(default = "auto_resume")]
    pub auto_resume: bool,
    /// How long it is idle before it is paused. Zero: it is never paused for that.
    #[serde(default = "idle", with = "crate::units::time")]
    pub idle: Duration,
    /// How long it is suspended before its memory goes to disk. Zero: only when memory is short.
    #[serde(default = "hibernate_after", with = "crate::units::time")]
    pub hibernate_after: Duration,
    /// What its maker notes on it.
    #[serde(default)]
    pub metadata: Metadata,
}

const fn timeout() -> Duration {
    TIMEOUT
}
const fn on_timeout() -> OnTimeout {
    OnTimeout::Kill
}
const fn auto_resume() -> bool {
    true
}
const fn idle() -> Duration {
    IDLE
}
const fn hibernate_after() -> Duration {
    HIBERNATE_AFTER
}

/// A sandbox at one moment. Times are milliseconds since the Unix epoch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SandboxInfo {
    /// What it is called.
    pub id: SandboxId,
    /// What it is made of.
    pub template: Name,
    /// Which build of that.
    pub template_version: Name,
    /// What it is.
    pub state: State,
    /// How often its record has changed.
    pub generation: u64,
    /// When it was made.
    pub created_at: Timestamp,
    /// Since when it is in its state.
    pub entered_at: Timestamp,
    /// When its time is over. None while its clock stands still.
    pub ends_at: Option<Timestamp>,
    /// What is left of its time while its clock stands still.
    pub time_left_ms: Option<u64>,
    /// What its deadline does.
    pub on_timeout: OnTimeout,
    /// Whether any request resumes it.
    pub auto_resume: bool,
    /// Since when it is idle, when it will be paused for that, and what holds it. None if it does not run.
    pub idle: Option<Idle>,
    /// What happens next if nobody does anything.
    pub next: Option<Next>,
    /// Requests in it, commands not counted.
    pub requests: usize,
    /// Commands that run in it.
    #[serde(default)]
    pub commands: usize,
    /// Requests that wait for it.
    pub waiting: usize,
    /// What keeps it from being paused for idleness.
    pub holds: Vec<Hold>,
    /// The process of its VM.
    pub pid: Option<u32>,
    /// What its agent proved when it was last made, or resumed.
    pub certificate: Option<serde_json::Value>,
    /// Why it failed, or why what was last tried on it did not work.
    pub failure: Option<String>,
    /// What its maker noted on it.
    pub metadata: Metadata,
    /// It was too busy to answer in time, and this is what its record says: idle time, requests, commands, process and certificate are not
    /// known.
    #[serde(default)]
    pub busy: bool,
}

/// A transition that comes by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Next {
    /// When.
    pub at: Timestamp,
    /// What.
    pub what: NextKind,
}

/// Which transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NextKind {
    /// It is paused.
    Pause,
    /// It is killed.
    Kill,
    /// Its memory goes to disk.
    Hibernate,
}

/// Where a pause puts the memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseTo {
    /// It stays in RAM, and goes to disk later.
    #[default]
    Ram,
    /// To disk, at once.
    Disk,
}

impl fmt::Display for PauseTo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ram => "ram",
            Self::Disk => "disk",
        })
    }
}

/// Why something was not done to a sandbox.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// No such sandbox.
    #[error("there is no sandbox {id:?}: it never was, or it was killed; /v1/sandboxes lists those that are there")]
    Unknown {
        /// As it was asked for.
        id: String,
    },
    /// It is in a state in which that is impossible.
    #[error("sandbox {id} is {state}: it cannot {wanted}; possible now: {}", allowed(*state))]
    State {
        /// Which.
        id: SandboxId,
        /// What it is.
        state: State,
        /// What was asked for.
        wanted: &'static str,
    },
    /// What was asked for makes no sense.
    #[error("{reason}")]
    Invalid {
        /// Why.
        reason: String,
    },
    /// There is no VM for a new one.
    #[error(transparent)]
    Claim(ClaimError),
    /// The node has no room for its VM now.
    #[error("sandbox {id} could not {wanted}: {full}")]
    NoCapacity {
        /// Which.
        id: SandboxId,
        /// What was asked for.
        wanted: &'static str,
        /// What is short.
        full: NoCapacity,
        /// When to try again.
        retry_after: Duration,
    },
    /// It was killed while a request was in it.
    #[error("sandbox {id} was killed while the request was in it: the request may have been carried out in part")]
    Gone {
        /// Which.
        id: SandboxId,
    },
    /// It was paused while a request was in it, which had had its time to finish.
    #[error(
        "sandbox {id} was paused while the request was in it, which did not end in time: it may have been carried out in part; \
         make sure that it may be repeated, and send it again"
    )]
    Cut {
        /// Which.
        id: SandboxId,
    },
    /// What runs in it did not take a connection.
    #[error("sandbox {id} did not take the request: {reason}; look at its logs")]
    Guest {
        /// Which.
        id: SandboxId,
        /// Why.
        reason: String,
    },
    /// A guest was told of a command, and nothing came of that.
    #[error(
        "sandbox {id} did not say whether the command was started: {reason}; it may have been, and was then killed at some point; \
         make sure that it may be repeated, and run it again"
    )]
    MayHaveRun {
        /// Which.
        id: SandboxId,
        /// Why it did not say so.
        reason: String,
    },
    /// Its guest did not start a command.
    #[error("sandbox {id} did not start the command: {reason}")]
    Command {
        /// Which.
        id: SandboxId,
        /// Why.
        reason: String,
    },
    /// Its guest starts no commands at all.
    #[error(
        "sandbox {id} runs no commands: the guest of template {template} has no exec; build the template on a base that has"
    )]
    NoExec {
        /// Which.
        id: SandboxId,
        /// What it is made of.
        template: TemplateName,
    },
    /// It was tried, and the node failed, without harm to it.
    #[error("sandbox {id} could not {wanted} now: {reason}; it is as it was: try again")]
    NotDone {
        /// Which.
        id: SandboxId,
        /// What was asked for.
        wanted: &'static str,
        /// Why.
        reason: String,
    },
    /// The store of records cannot be used.
    #[error("the store of sandboxes cannot be used: {reason}; nothing new is begun until it can, what runs goes on")]
    Store {
        /// Why.
        reason: String,
    },
    /// It did not happen in time; it may still.
    #[error("sandbox {id} did not {wanted} within {limit:?}: look at it again")]
    Late {
        /// Which.
        id: SandboxId,
        /// What was asked for.
        wanted: &'static str,
        /// How long was waited.
        limit: Duration,
    },
}

/// What can be asked of a sandbox in a state, be it that it waits until what is going on has ended. One that resumes by itself also takes
/// requests and commands whenever it can be resumed.
#[must_use]
pub const fn allowed(state: State) -> &'static str {
    match state {
        State::Running => "requests, commands, pause, pause to disk, resume, fork, timeout, hold, release, logs, kill",
        State::Creating | State::Resuming => "requests, commands, resume, timeout, hold, release, logs, kill",
        State::Suspended => "pause to disk, resume, timeout, hold, release, logs, kill",
        State::Pausing | State::Hibernating | State::Hibernated => "resume, timeout, hold, release, logs, kill",
        State::Failed | State::Killing => "logs, kill",
        State::Gone => "nothing",
    }
}

/// The sandboxes of a node, as a gateway sees them.
pub trait Sandboxes: Send + Sync {
    /// Makes one, which runs when this returns. `budget`: how long it may wait for a VM.
    fn create(&self, new: NewSandbox, budget: Duration) -> BoxFuture<'_, Result<SandboxInfo, SandboxError>>;

    /// All of them, or those in one state, by id.
    fn list(&self, state: Option<State>) -> BoxFuture<'_, Vec<SandboxInfo>>;

    /// The template of one that is there.
    fn template_of(&self, id: &str) -> Option<TemplateName>;

    /// One.
    fn inspect<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<SandboxInfo, SandboxError>>;

    /// Pauses one. Requests in it may finish for a while, and are then cut.
    fn pause<'a>(&'a self, id: &'a str, to: PauseTo) -> BoxFuture<'a, Result<SandboxInfo, SandboxError>>;

    /// Lets one run, and whether it had to be resumed for that. A timeout starts its time anew.
    fn resume<'a>(
        &'a self,
        id: &'a str,
        timeout: Option<Duration>,
    ) -> BoxFuture<'a, Result<(SandboxInfo, bool), SandboxError>>;

    /// Its time is over so long from now, or so long after it is resumed.
    fn timeout<'a>(&'a self, id: &'a str, timeout: Duration) -> BoxFuture<'a, Result<SandboxInfo, SandboxError>>;

    /// Keeps it from being paused for idleness, for so long or until it is released.
    fn hold<'a>(
        &'a self,
        id: &'a str,
        name: Name,
        lasts: Option<Duration>,
    ) -> BoxFuture<'a, Result<SandboxInfo, SandboxError>>;

    /// Takes a hold away, whether it is there or not.
    fn release<'a>(&'a self, id: &'a str, name: Name) -> BoxFuture<'a, Result<SandboxInfo, SandboxError>>;

    /// Makes `count` more of a running one, 1 to 100, that go on from one moment of it: each with memory and disk of its own and as somebody
    /// else, with its lifetime begun anew. All of them, or none. It goes on itself. `budget`: in which they must be
    /// started.
    fn fork<'a>(
        &'a self,
        id: &'a str,
        count: u32,
        budget: Duration,
    ) -> BoxFuture<'a, Result<Vec<SandboxInfo>, SandboxError>>;

    /// Removes one, whatever it does. When this returns nothing is left of it.
    fn kill<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<(), SandboxError>>;

    /// Connects to its function, and resumes it for that if it is paused. It is not paused while the claim's lease lives.
    fn visit<'a>(&'a self, id: &'a str, budget: Duration) -> BoxFuture<'a, Result<Claim, SandboxError>>;

    /// Runs a command beside its function, and resumes it for that if it is paused. It is not paused while the command runs.
    fn exec<'a>(
        &'a self,
        id: &'a str,
        command: Command,
        budget: Duration,
    ) -> BoxFuture<'a, Result<CommandEvents, SandboxError>>;

    /// What its function and its console have said last.
    fn logs<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<SandboxLogs, SandboxError>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_one_says_little_and_nothing_unknown() {
        let new: NewSandbox = serde_json::from_str(r#"{"template":"x","timeout":"90s"}"#).unwrap();
        assert_eq!((new.timeout, new.on_timeout, new.auto_resume), (Duration::from_secs(90), OnTimeout::Kill, true));
        for bad in
            [r#"{"template":"x","time":"1s"}"#, r#"{"template":"x","timeout":"1parsec"}"#, r#"{"template":"X!"}"#]
        {
            assert!(serde_json::from_str::<NewSandbox>(bad).is_err(), "{bad}");
        }
    }
}
