//! The stream of one call: Start's or Connect's.
//!
//! ```text
//!  started ─▶ running: output, keepalives ─▶ end of the process ─▶ last frame
//!                └─ deadline of the call, or given up by the hub: last frame with the error
//! ```

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{Stream, stream::unfold};
use http::HeaderMap;
use tokio::time::{Instant, sleep_until};

use crate::{
    connect::{self, Code, RpcError},
    keepalive::Keepalive,
    process::{
        message::{Event, Said},
        output::Subscriber,
        running::Process,
    },
};

struct Events {
    phase: Phase,
    process: Arc<Process>,
    subscriber: Subscriber,
    keepalive: Keepalive,
    deadline: Option<Instant>,
}

enum Phase {
    Started,
    Running,
    Ending,
    Done,
}

/// The frames of a call that began now.
pub(super) fn stream(
    process: Arc<Process>,
    subscriber: Subscriber,
    headers: &HeaderMap,
) -> Result<impl Stream<Item = Bytes> + use<>, RpcError> {
    let deadline = deadline(headers)?.map(|after| Instant::now() + after);
    let events = Events { phase: Phase::Started, process, subscriber, keepalive: Keepalive::asked(headers), deadline };
    Ok(unfold(events, |mut events| async move { Some((events.next().await?, events)) }))
}

impl Events {
    async fn next(&mut self) -> Option<Bytes> {
        match self.phase {
            Phase::Started => {
                self.phase = Phase::Running;
                Some(said(Event::Start { pid: self.process.pid }))
            }
            Phase::Running => Some(self.running().await),
            Phase::Ending => {
                self.phase = Phase::Done;
                Some(connect::end(None))
            }
            Phase::Done => None,
        }
    }

    async fn running(&mut self) -> Bytes {
        let deadline = self.deadline;
        tokio::select! {
            biased;
            () = async { sleep_until(deadline.unwrap_or_else(Instant::now)).await }, if deadline.is_some() => {
                self.failed(Code::DeadlineExceeded, "the call's deadline is over; the process goes on: connect to it, or kill it")
            }
            output = self.subscriber.next() => match output {
                Some(frame) => {
                    self.keepalive.said();
                    frame
                }
                None => self.ended(),
            },
            () = self.keepalive.due() => {
                self.keepalive.said();
                said(Event::Keepalive {})
            }
        }
    }

    fn ended(&mut self) -> Bytes {
        match self.process.ended() {
            Some(end) if !self.subscriber.was_cut() => {
                self.phase = Phase::Ending;
                said(Event::End(&end))
            }
            _ => self.failed(Code::ResourceExhausted, "output was not taken for too long and is lost: connect again"),
        }
    }

    fn failed(&mut self, code: Code, message: &str) -> Bytes {
        self.phase = Phase::Done;
        connect::end(Some(&RpcError::new(code, message)))
    }
}

fn said(event: Event<'_>) -> Bytes {
    connect::message(&Said { event })
}

/// How long the call may last: `Connect-Timeout-Ms`, of at most ten digits; absent or 0, for ever.
pub(super) fn deadline(headers: &HeaderMap) -> Result<Option<Duration>, RpcError> {
    let Some(header) = headers.get("connect-timeout-ms") else { return Ok(None) };
    let milliseconds = (header.to_str().ok().filter(|text| text.len() <= 10)).and_then(|text| text.parse::<u64>().ok());
    match milliseconds {
        Some(0) => Ok(None),
        Some(milliseconds) => Ok(Some(Duration::from_millis(milliseconds))),
        None => Err(RpcError::invalid("connect-timeout-ms must be a number of at most ten digits")),
    }
}
