//! Errors, and how each kind of call tells them.

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::StatusCode;
use serde::Serialize;

use crate::{answer, connect::frame};

/// Connect's codes, as many as are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Code {
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Unimplemented,
    Internal,
    Unauthenticated,
}

impl Code {
    /// Its name on the wire.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid_argument",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::NotFound => "not_found",
            Self::AlreadyExists => "already_exists",
            Self::PermissionDenied => "permission_denied",
            Self::ResourceExhausted => "resource_exhausted",
            Self::FailedPrecondition => "failed_precondition",
            Self::Unimplemented => "unimplemented",
            Self::Internal => "internal",
            Self::Unauthenticated => "unauthenticated",
        }
    }

    /// The status that goes with it, by Connect's table.
    pub(crate) fn status(self) -> StatusCode {
        match self {
            Self::InvalidArgument | Self::FailedPrecondition => StatusCode::BAD_REQUEST,
            Self::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::AlreadyExists => StatusCode::CONFLICT,
            Self::PermissionDenied => StatusCode::FORBIDDEN,
            Self::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Self::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Self::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
        }
    }
}

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct RpcError {
    pub(crate) code: Code,
    pub(crate) message: String,
}

/// As the wire has it.
#[derive(Debug, Serialize)]
pub(crate) struct Told<'a> {
    code: &'static str,
    message: &'a str,
}

impl RpcError {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// The request is wrong.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    pub(crate) fn told(&self) -> Told<'_> {
        Told { code: self.code.name(), message: &self.message }
    }

    /// The answer of a unary call.
    pub(crate) fn into_unary(self) -> Response {
        answer::json(self.code.status(), &self.told())
    }

    /// The answer of a call with a stream: nothing but the end.
    pub(crate) fn into_stream(self) -> Response {
        frame::response(Body::from(frame::end(Some(&self)))).into_response()
    }
}
