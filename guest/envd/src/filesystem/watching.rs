//! Watches as tokio's, and the stream of WatchDir.

use std::{collections::VecDeque, sync::Arc};

use bytes::Bytes;
use futures_util::{Stream, stream::unfold};
use http::HeaderMap;

use crate::{
    connect::{self, Code, RpcError},
    envd::Envd,
    fd::{self, Fd},
    filesystem::{
        entry::Entry,
        message::{self, Event, Kind, Said},
        operations,
        watch::{Change, Watch, WatchError},
    },
    keepalive::Keepalive,
    paths,
    users::User,
};

/// A watch that can be waited for.
#[derive(Debug)]
pub(super) struct Watching {
    watch: Watch,
    fd: Arc<Fd>,
    envd: Envd,
    include_entry: bool,
}

impl Watching {
    /// Begins one.
    pub(super) async fn begin(envd: &Envd, user: &User, request: message::Watch) -> Result<Self, RpcError> {
        let path = paths::resolve(&request.path, user, envd.workdir().as_deref())
            .map_err(|error| RpcError::invalid(error.to_string()))?;
        let message::Watch { recursive, include_entry, allow_network_mounts, .. } = request;
        let begun = tokio::task::spawn_blocking(move || {
            operations::check_watched(&path, allow_network_mounts)?;
            Watch::new(path, recursive)
                .map_err(|error| RpcError::new(Code::ResourceExhausted, format!("error creating watcher: {error}")))
        });
        let (watch, fd) = begun.await.map_err(|error| RpcError::new(Code::Internal, error.to_string()))??;
        let fd =
            fd::take(fd).map_err(|error| RpcError::new(Code::Internal, format!("error creating watcher: {error}")))?;
        Ok(Self { watch, fd: Arc::new(fd), envd: envd.clone(), include_entry })
    }

    /// Waits until something has happened, and takes it. Nothing is lost if this is dropped while it waits.
    async fn next(&mut self) -> Result<Vec<Event>, RpcError> {
        let fd = Arc::clone(&self.fd);
        loop {
            let mut ready = fd.readable().await.map_err(|error| told(&error.into()))?;
            let (events, all) = self.now()?;
            if all {
                ready.clear_ready();
            }
            if !events.is_empty() {
                return Ok(events);
            }
        }
    }

    /// What has happened by now, and whether that is all.
    pub(super) fn now(&mut self) -> Result<(Vec<Event>, bool), RpcError> {
        let mut changes = Vec::new();
        let all =
            self.watch.read(self.fd.get_ref(), &mut |change| changes.push(change)).map_err(|error| told(&error))?;
        Ok((self.events(changes), all))
    }

    /// What is readable when something has happened.
    pub(super) fn fd(&self) -> Arc<Fd> {
        Arc::clone(&self.fd)
    }

    fn events(&self, changes: Vec<Change>) -> Vec<Event> {
        let users = self.include_entry.then(|| self.envd.users());
        let event = |(path, kind): Change| {
            let entry = match kind {
                Kind::Remove | Kind::Rename => None,
                // What vanished meanwhile has none.
                Kind::Create | Kind::Write | Kind::Chmod => {
                    users.as_ref().and_then(|users| Entry::read(&self.watch.root().join(&path), users).ok())
                }
            };
            Event { name: path.to_string_lossy().into_owned(), kind, entry }
        };
        changes.into_iter().map(event).collect()
    }
}

fn told(error: &WatchError) -> RpcError {
    let code = if matches!(error, WatchError::Overflow) { Code::ResourceExhausted } else { Code::Internal };
    RpcError::new(code, error.to_string())
}

struct Events {
    watching: Watching,
    keepalive: Keepalive,
    waiting: VecDeque<Bytes>,
    done: bool,
}

/// The frames of WatchDir, until the client leaves.
pub(super) fn stream(watching: Watching, headers: &HeaderMap) -> impl Stream<Item = Bytes> + use<> {
    let waiting = VecDeque::from([connect::message(&Said::Start {})]);
    let events = Events { watching, keepalive: Keepalive::asked(headers), waiting, done: false };
    unfold(events, |mut events| async move { Some((events.next().await?, events)) })
}

impl Events {
    async fn next(&mut self) -> Option<Bytes> {
        while !self.done && self.waiting.is_empty() {
            tokio::select! {
                happened = self.watching.next() => match happened {
                    Ok(events) => self.waiting.extend(events.into_iter().map(|event| connect::message(&Said::Filesystem(Box::new(event))))),
                    Err(error) => {
                        self.done = true;
                        return Some(connect::end(Some(&error)));
                    }
                },
                () = self.keepalive.due() => self.waiting.push_back(connect::message(&Said::Keepalive {})),
            }
            self.keepalive.said();
        }
        self.waiting.pop_front()
    }
}
