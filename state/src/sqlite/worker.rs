//! A thread that does one thing after another.

use std::{
    fmt, io,
    sync::mpsc::{Receiver, Sender, channel},
    thread::{self, JoinHandle},
};

use crate::StoreError;

/// Takes work by a queue, in order. Dropping it lets it finish what it has, and waits for that: afterwards the file is closed.
pub(super) struct Worker<T> {
    queue: Option<Sender<T>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts it. `run` returns when the queue has ended.
    pub(super) fn start(name: &str, run: impl FnOnce(Receiver<T>) + Send + 'static) -> io::Result<Self> {
        let (queue, work) = channel();
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || run(work))?;
        Ok(Self { queue: Some(queue), thread: Some(thread) })
    }
}

impl<T> fmt::Debug for Worker<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Worker").field(&self.thread.as_ref().map(|thread| thread.thread().name())).finish()
    }
}

impl<T> Worker<T> {
    pub(super) fn give(&self, work: T) -> Result<(), StoreError> {
        self.queue.as_ref().and_then(|queue| queue.send(work).ok()).ok_or_else(ended)
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        drop(self.queue.take());
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("a thread of the store has panicked; what it had acknowledged is in the file");
        }
    }
}

/// The thread is gone.
pub(super) fn ended() -> StoreError {
    StoreError::Unavailable { reason: "its thread has ended".to_owned() }
}
