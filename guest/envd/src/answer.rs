//! Answers that are not Connect's: errors as `{"code":401,"message":"…"}`.

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header::CONTENT_TYPE};
use serde::Serialize;

/// A refusal, told as JSON.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Refusal {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        #[derive(Serialize)]
        struct Told<'a> {
            code: u16,
            message: &'a str,
        }
        json(self.status, &Told { code: self.status.as_u16(), message: &self.message })
    }
}

/// `value` as JSON.
pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> Response {
    // What we serialise are maps with text keys: that cannot fail.
    let bytes = serde_json::to_vec(value).unwrap_or_default();
    let mut response = Response::new(Body::from(bytes));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
