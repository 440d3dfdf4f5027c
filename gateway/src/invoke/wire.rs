//! Who moves the bytes of a connection to a function.
//!
//! ```text
//! here: whoever waits for the answer ──go_apart──▶ apart: a task of its own
//! ```
//! An exchange that is short needs no task: each hand-over to one is a wake-up, and may be another processor's. One whose answer streams
//! does: its caller may read slowly, or send its whole body first.

use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll},
};

use hyper::{body::Incoming, client::conn::http1::Connection};
use hyper_util::rt::TokioIo;
use tokio_util::task::AbortOnDropHandle;

use super::guest_io::GuestIo;
use crate::upload::Upload;

type Bytes = Connection<TokioIo<GuestIo>, Upload<Incoming>>;

/// One connection. Dropping it closes it.
pub(super) enum Wire {
    Here(Box<Bytes>),
    Apart {
        _task: AbortOnDropHandle<()>,
    },
    /// It has ended. Its errors reach the request's and the answer's futures.
    Ended,
}

impl Wire {
    pub(super) fn new(connection: Bytes) -> Self {
        Self::Here(Box::new(connection))
    }

    /// Waits for `exchange`, and moves the bytes meanwhile.
    pub(super) async fn carry<F: Future>(&mut self, mut exchange: Pin<&mut F>) -> F::Output {
        poll_fn(|cx| {
            // What it asks for is sent in this turn, and what has come reaches it.
            if let Poll::Ready(done) = exchange.as_mut().poll(cx) {
                return Poll::Ready(done);
            }
            self.poll_here(cx);
            exchange.as_mut().poll(cx)
        })
        .await
    }

    pub(super) fn go_apart(&mut self) {
        match std::mem::replace(self, Self::Ended) {
            Self::Here(connection) => {
                let task = tokio::spawn(async {
                    let _ = connection.await;
                });
                *self = Self::Apart { _task: AbortOnDropHandle::new(task) };
            }
            other => *self = other,
        }
    }

    fn poll_here(&mut self, cx: &mut Context<'_>) {
        if let Self::Here(connection) = self
            && Pin::new(connection).poll(cx).is_ready()
        {
            *self = Self::Ended;
        }
    }
}
