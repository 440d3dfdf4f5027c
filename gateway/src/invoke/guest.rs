//! The connection to one function, and the lease of its VM. Both end when this is dropped.

use std::{
    pin::pin,
    time::{Duration, Instant},
};

use http::{Request, StatusCode};
use hyper::{
    body::Incoming,
    client::conn::http1::{self, SendRequest},
};
use hyper_util::rt::TokioIo;
use stasis_pool_api::{GuestStream, Lease, SandboxError};

use super::{answer::Head, guest_io::GuestIo, wire::Wire};
use crate::{
    error::ApiError,
    request_id::RequestId,
    upload::{Upload, UploadFault, UploadWatch},
};

/// Fields are dropped in this order: first the connection, then the VM. A connection that has gone apart is only told to end, and does so when
/// its task is run next, be it behind the lease's end: a rewind ends it in any case, and of a sandbox the request is over as well.
pub(super) struct Guest {
    sender: SendRequest<Upload<Incoming>>,
    wire: Wire,
    lease: Box<dyn Lease>,
    upload: UploadWatch,
    id: RequestId,
}

/// Who broke an exchange off.
#[derive(Debug)]
pub(super) enum Broken {
    /// The caller: its body was too large, or it left.
    Caller(UploadFault),
    /// The function, for this reason. The node has been told.
    Function(String),
    /// The node, which has killed or paused the sandbox.
    Node(SandboxError),
}

impl From<Broken> for ApiError {
    fn from(broken: Broken) -> Self {
        match broken {
            Broken::Caller(fault) => fault.into(),
            Broken::Function(reason) => Self::Function { reason },
            Broken::Node(error) => Self::Sandbox(error),
        }
    }
}

impl Guest {
    pub(super) async fn connect(
        stream: Box<dyn GuestStream>,
        lease: Box<dyn Lease>,
        upload: UploadWatch,
        id: RequestId,
    ) -> Result<Self, ApiError> {
        let shaken = http1::handshake(TokioIo::new(GuestIo::new(stream))).await;
        let (sender, connection) = shaken.map_err(|error| match lease.taken_back() {
            Some(error) => ApiError::Sandbox(error),
            None => ApiError::Function { reason: describe(&error) },
        })?;
        Ok(Self { sender, wire: Wire::new(connection), lease, upload, id })
    }

    /// Sends the request and waits for the head of the answer; the body keeps streaming in meanwhile and after.
    pub(super) async fn send(
        &mut self,
        request: Request<Upload<Incoming>>,
        timeout: Duration,
    ) -> Result<Head, ApiError> {
        let sent = Instant::now();
        let asked = pin!(self.sender.send_request(request));
        let answer = match tokio::time::timeout(timeout, self.wire.carry(asked)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => return Err(self.broken(&error).into()),
            Err(_) => {
                self.lease.report_failure(self.id.as_str(), &format!("no answer within {timeout:?}"));
                return Err(ApiError::Timeout { timeout });
            }
        };
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Err(self.fail("it switched protocols without being asked".to_owned()).into());
        }
        let took = sent.elapsed();
        Ok(Head { answer, took, patience: timeout.saturating_sub(took) })
    }

    /// Waits for what comes over the connection, and moves its bytes meanwhile.
    pub(super) async fn carry<T>(&mut self, exchange: impl Future<Output = T>) -> T {
        self.wire.carry(pin!(exchange)).await
    }

    /// The answer is complete.
    pub(super) fn served(&self) {
        self.lease.served();
    }

    /// From now on the bytes move whether somebody waits for them or not.
    pub(super) fn go_apart(&mut self) {
        self.wire.go_apart();
    }

    /// Finds out whose fault `error` is, and tells the node where it is the function's.
    pub(super) fn broken(&self, error: &hyper::Error) -> Broken {
        match (self.upload.fault(), self.lease.taken_back()) {
            (Some(fault), _) => Broken::Caller(fault),
            (None, Some(error)) => Broken::Node(error),
            (None, None) => self.fail(describe(error)),
        }
    }

    fn fail(&self, reason: String) -> Broken {
        self.lease.report_failure(self.id.as_str(), &reason);
        Broken::Function(reason)
    }
}

fn describe(error: &hyper::Error) -> String {
    if error.is_incomplete_message() || error.is_closed() || error.is_canceled() {
        "its connection ended before the answer was complete".to_owned()
    } else if error.is_parse() {
        format!("what it answered is not HTTP: {error}")
    } else {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(cause) = source {
            text = format!("{text}: {cause}");
            source = cause.source();
        }
        text
    }
}
