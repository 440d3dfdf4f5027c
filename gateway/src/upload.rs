//! A request's body on its way in: counted against a limit, and read to its end even when nobody wants it.
//!
//! A server that answers while the caller still sends, and closes, makes the kernel reset the connection, and the caller never
//! sees the answer. So a body that is dropped early is drained for a while.

use std::{
    collections::VecDeque,
    future::poll_fn,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;

use crate::error::ApiError;

/// How long a body that nobody wants is read.
const LINGER: Duration = Duration::from_secs(5);

/// Why a body did not arrive as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UploadFault {
    /// More than the limit.
    #[error("the body is larger than {limit} bytes")]
    TooLarge {
        /// The limit.
        limit: u64,
    },
    /// The caller left, or its framing is broken.
    #[error("the request's body ended early")]
    Cut,
}

impl From<UploadFault> for ApiError {
    fn from(fault: UploadFault) -> Self {
        match fault {
            UploadFault::TooLarge { limit } => Self::TooLarge { limit },
            UploadFault::Cut => Self::BodyCut,
        }
    }
}

/// What became of an upload, for those who gave it away.
#[derive(Debug, Clone, Default)]
pub(crate) struct UploadWatch(Arc<OnceLock<UploadFault>>);

impl UploadWatch {
    pub(crate) fn fault(&self) -> Option<UploadFault> {
        self.0.get().copied()
    }
}

/// A body that yields at most its limit.
#[derive(Debug)]
pub(crate) struct Upload<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
{
    /// `None` once it has ended or failed.
    body: Option<B>,
    /// Read already, not yet taken.
    ahead: VecDeque<Frame<Bytes>>,
    limit: u64,
    seen: u64,
    watch: UploadWatch,
    /// The caller waits for a `100 Continue`, which reading would send.
    held_back: bool,
}

impl<B> Upload<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
{
    pub(crate) fn new(headers: &HeaderMap, body: B, limit: u64) -> Self {
        let held_back = headers.contains_key(header::EXPECT);
        Self { body: Some(body), ahead: VecDeque::new(), limit, seen: 0, watch: UploadWatch::default(), held_back }
    }

    /// Refuses a body that declares more than the limit.
    pub(crate) fn check_declared(&self) -> Result<(), UploadFault> {
        if self.size_hint().lower() > self.limit { Err(UploadFault::TooLarge { limit: self.limit }) } else { Ok(()) }
    }

    pub(crate) fn watch(&self) -> UploadWatch {
        self.watch.clone()
    }

    /// Reads until the body ends or `bytes` are there. A caller that waits for `100 Continue` goes on waiting.
    pub(crate) async fn read_ahead(&mut self, bytes: usize) -> Result<(), UploadFault> {
        let mut read = 0;
        while !self.held_back && read < bytes {
            match poll_fn(|cx| self.poll_body(cx)).await {
                Some(frame) => {
                    let frame = frame?;
                    read += frame.data_ref().map_or(0, Bytes::len);
                    self.ahead.push_back(frame);
                }
                None => break,
            }
        }
        Ok(())
    }

    fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, UploadFault>>> {
        if let Some(fault) = self.watch.fault() {
            return Poll::Ready(Some(Err(fault)));
        }
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        self.held_back = false;
        let fault = match ready!(Pin::new(body).poll_frame(cx)) {
            Some(Ok(frame)) => {
                self.seen += frame.data_ref().map_or(0, |data| data.len() as u64);
                if self.seen <= self.limit {
                    return Poll::Ready(Some(Ok(frame)));
                }
                UploadFault::TooLarge { limit: self.limit }
            }
            Some(Err(_)) => {
                self.body = None;
                UploadFault::Cut
            }
            None => {
                self.body = None;
                return Poll::Ready(None);
            }
        };
        let _ = self.watch.0.set(fault);
        Poll::Ready(Some(Err(fault)))
    }
}

impl<B> Body for Upload<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
{
    type Data = Bytes;
    type Error = UploadFault;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, UploadFault>>> {
        let this = self.get_mut();
        match this.ahead.pop_front() {
            Some(frame) => Poll::Ready(Some(Ok(frame))),
            None => this.poll_body(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ahead.is_empty() && self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let rest = self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint);
        let ahead: usize = self.ahead.iter().filter_map(Frame::data_ref).map(Bytes::len).sum();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + ahead as u64);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + ahead as u64);
        }
        hint
    }
}

impl<B> Drop for Upload<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
{
    fn drop(&mut self) {
        let Some(mut body) = self.body.take() else { return };
        if self.held_back || body.is_end_stream() {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let drain = async { while let Some(Ok(_)) = body.frame().await {} };
                let _ = tokio::time::timeout(LINGER, drain).await;
            });
        }
    }
}
