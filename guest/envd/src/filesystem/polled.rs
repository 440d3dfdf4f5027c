//! Watches that are asked, instead of telling.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::task::AbortHandle;
use uuid::Uuid;

use crate::{
    connect::{Code, RpcError},
    filesystem::{message::Event, watching::Watching},
};

/// Most events that wait to be asked for.
const KEPT: usize = 64 * 1024;

/// By their ids.
#[derive(Debug, Default)]
pub(crate) struct Watchers(Mutex<HashMap<String, Polled>>);

/// One of them, with the task that keeps the kernel's queue short.
#[derive(Debug)]
struct Polled {
    state: Arc<Mutex<State>>,
    task: AbortHandle,
}

impl Drop for Polled {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What has happened, and why nothing more will.
#[derive(Debug)]
struct State {
    watching: Watching,
    events: Vec<Event>,
    error: Option<RpcError>,
}

impl State {
    /// Takes in what has happened by now; whether that is all.
    fn update(&mut self) -> bool {
        if self.error.is_some() {
            return true;
        }
        match self.watching.now() {
            Ok((events, all)) if self.events.len() + events.len() <= KEPT => {
                self.events.extend(events);
                return all;
            }
            Ok(_) => {
                let message = format!("more than {KEPT} events were not asked for: watch again, and ask more often");
                self.error = Some(RpcError::new(Code::ResourceExhausted, message));
            }
            Err(error) => self.error = Some(error),
        }
        true
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watchers {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Polled>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one in.
    pub(super) fn add(&self, watching: Watching) -> String {
        let id = format!("w{}", Uuid::new_v4().simple());
        let fd = watching.fd();
        let state = Arc::new(Mutex::new(State { watching, events: Vec::new(), error: None }));
        let followed = Arc::clone(&state);
        let task = tokio::spawn(async move {
            while let Ok(mut ready) = fd.readable().await {
                let mut state = lock(&followed);
                if state.update() {
                    ready.clear_ready();
                }
                if state.error.is_some() {
                    return;
                }
            }
        });
        self.all().insert(id.clone(), Polled { state, task: task.abort_handle() });
        id
    }

    /// What has happened since it was last asked.
    pub(super) fn take(&self, id: &str) -> Result<Vec<Event>, RpcError> {
        let state = self.all().get(id).map(|polled| Arc::clone(&polled.state)).ok_or_else(|| unknown(id))?;
        let mut state = lock(&state);
        // It may not have been told to the task yet.
        state.update();
        match &state.error {
            Some(error) if state.events.is_empty() => Err(error.clone()),
            _ => Ok(std::mem::take(&mut state.events)),
        }
    }

    pub(super) fn remove(&self, id: &str) -> Result<(), RpcError> {
        self.all().remove(id).map(drop).ok_or_else(|| unknown(id))
    }
}

fn unknown(id: &str) -> RpcError {
    RpcError::new(Code::NotFound, format!("watcher with id {id} not found"))
}
