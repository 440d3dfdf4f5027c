//! The function's answer on its way out.
//!
//! ```text
//! Head ──settle──▶ Answer ──deliver──▶ AnswerBody: streaming ──▶ ended (VM freed, invocation told)
//!   └─ broke off while small: 502                      ├─ broke off: the caller's connection is cut, 502 told
//!                                                      └─ dropped: the caller left, 499 told
//! ```

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::response::Response;
use bytes::{Bytes, BytesMut};
use http::{StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::{body::Incoming, ext::ReasonPhrase};

use super::{
    guest::{Broken, Guest},
    headers::strip_hop_by_hop,
    timing,
};
use crate::{error::ApiError, events::Invocation};

/// Answers that declare at most this are awaited whole, so that a crash in the midst of one is a clean 502.
const SMALL: u64 = 64 << 10;

/// An answer whose head has arrived.
pub(super) struct Head {
    pub(super) answer: http::Response<Incoming>,
    /// From the request to this head.
    pub(super) took: Duration,
    /// What is left of the function's time: how long a small answer is awaited before it streams like a large one.
    pub(super) patience: Duration,
}

/// An answer that can be passed on, with what of its body has arrived.
pub(super) struct Answer {
    head: http::response::Parts,
    arrived: Bytes,
    rest: Incoming,
    guest: Guest,
}

impl Head {
    pub(super) async fn settle(self, mut guest: Guest) -> Result<Answer, ApiError> {
        let (head, mut rest) = self.answer.into_parts();
        let mut arrived = Bytes::new();
        if let Some(length @ 1..=SMALL) = rest.size_hint().exact() {
            let mut whole = BytesMut::with_capacity(usize::try_from(length).unwrap_or_default());
            let collect = async {
                while !rest.is_end_stream() {
                    match rest.frame().await {
                        Some(frame) => whole.extend_from_slice(&frame?.into_data().unwrap_or_default()),
                        None => break,
                    }
                }
                Ok::<_, hyper::Error>(())
            };
            if let Ok(Err(error)) = tokio::time::timeout(self.patience, guest.carry(collect)).await {
                return Err(guest.broken(&error).into());
            }
            arrived = whole.freeze();
        }
        if !rest.is_end_stream() {
            guest.go_apart();
        }
        Ok(Answer { head, arrived, rest, guest })
    }
}

impl Answer {
    /// The response for the caller. `call` ends with it.
    pub(super) fn deliver(self, call: Invocation) -> Response {
        let Self { mut head, arrived, rest, guest } = self;
        strip_hop_by_hop(&mut head.headers);
        if rest.size_hint().exact().is_none() {
            head.headers.remove(header::CONTENT_LENGTH);
        }
        timing::stamp(&mut head.headers, &call);

        let mut body = AnswerBody { arrived, rest, open: Some(Open { guest, call }), status: head.status };
        body.note_end();
        let mut response = Response::new(axum::body::Body::new(body));
        *response.status_mut() = head.status;
        *response.headers_mut() = head.headers;
        if let Some(reason) = head.extensions.remove::<ReasonPhrase>() {
            response.extensions_mut().insert(reason);
        }
        response
    }
}

/// Owns the VM until the answer has left it.
struct AnswerBody {
    arrived: Bytes,
    rest: Incoming,
    /// `None` once the answer is complete or broken.
    open: Option<Open>,
    status: StatusCode,
}

/// Fields are dropped in this order: first the VM, then the invocation is told.
struct Open {
    guest: Guest,
    call: Invocation,
}

/// The answer broke off: hyper must not end it cleanly.
#[derive(Debug, thiserror::Error)]
#[error("the answer broke off")]
struct BrokeOff;

impl AnswerBody {
    fn note_end(&mut self) {
        if self.is_end_stream() {
            self.end();
        }
    }

    /// The answer is complete. Its last bytes leave when this turn of the connection's task is over: the VM's way back and the log come
    /// after that, and after other answers that are ready to leave.
    fn end(&mut self) {
        let Some(mut open) = self.open.take() else { return };
        open.call.ended(self.status);
        // A caller that asks again as soon as it is answered finds its place free.
        open.guest.served();
        tokio::spawn(async move {
            tokio::task::yield_now().await;
            drop(open);
        });
    }

    fn note_broken(&mut self, error: &hyper::Error) {
        let Some(Open { guest, mut call }) = self.open.take() else { return };
        match guest.broken(error) {
            Broken::Function(reason) => {
                tracing::warn!(request_id = %call.id(), reason, "the function broke its answer off");
                call.ended(StatusCode::BAD_GATEWAY);
            }
            broken @ (Broken::Caller(_) | Broken::Node(_)) => {
                let error = ApiError::from(broken);
                if !matches!(error, ApiError::BodyCut) {
                    call.ended(error.status());
                }
            }
        }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = BrokeOff;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BrokeOff>>> {
        let this = &mut *self;
        let frame = if this.arrived.is_empty() {
            ready!(Pin::new(&mut this.rest).poll_frame(cx))
        } else {
            Some(Ok(Frame::data(std::mem::take(&mut this.arrived))))
        };
        Poll::Ready(match frame {
            Some(Ok(frame)) => {
                if let Some(open) = &mut this.open {
                    open.call.sent(frame.data_ref().map_or(0, |data| data.len() as u64));
                }
                this.note_end();
                Some(Ok(frame))
            }
            Some(Err(error)) => {
                this.note_broken(&error);
                Some(Err(BrokeOff))
            }
            None => {
                this.end();
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.arrived.is_empty() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let rest = self.rest.size_hint();
        let arrived = self.arrived.len() as u64;
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + arrived);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + arrived);
        }
        hint
    }
}
