//! What a caller is told when there is no answer to pass on.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderName, HeaderValue, StatusCode, header};
use serde_json::{Map, Value, json};
use stasis_pool_api::{BuildFailure, ClaimError, RemoveError, SandboxError, SetPoolError, allowed_of_sandbox};

use crate::request_id::RequestId;

/// Where the templates are listed.
pub(crate) const TEMPLATES_URL: &str = "/v1/templates";
const FAILED_COMPONENT: HeaderName = HeaderName::from_static("x-failed-component");
/// When to come back after the platform could not do something: VMs do not start, a disk is full, something took too long. Chosen, since there
/// is no figure: what mends it is not on its way, it takes a person or a change outside of this node.
const BROKEN_RETRY: Duration = Duration::from_secs(5);

/// Why a request is refused or failed. Each says what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
    /// No such route.
    #[error(
        "there is nothing at {path}: invoke a function at /invoke/TEMPLATE/PATH; templates are listed at {TEMPLATES_URL}"
    )]
    NoRoute { path: String },
    /// The route exists, the method does not.
    #[error("{method} is not possible at {path}: the Allow header lists what is")]
    Method { method: String, path: String },
    /// Also for names that no template can have.
    #[error("there is no template {name:?}: {TEMPLATES_URL} lists the templates, `stasis template build DIR` adds one")]
    UnknownTemplate { name: String },
    /// No key, or one that nobody has.
    #[error("no tenant has the key of this request: send yours in the header X-API-Key")]
    Key,
    /// A pool was not set.
    #[error("{0}")]
    SetPool(#[source] SetPoolError),
    /// The path of an invocation is not a URL's path.
    #[error("the request's path cannot be passed on: {reason}")]
    Path { reason: String },
    /// A parameter of the API.
    #[error("the query is not understood: {reason}")]
    Query { reason: String },
    /// Before or while it was read.
    #[error("the body is larger than {limit} bytes, which is the limit here: send less, or raise the gateway's limit")]
    TooLarge { limit: u64 },
    /// The body broke off: nobody is there to read this.
    #[error("the request's body ended early: send all that Content-Length or the chunks announce")]
    BodyCut,
    /// A template is sent as a tar archive.
    #[error("a template is sent as a tar archive of its folder, with Content-Type: application/x-tar")]
    MediaType,
    /// No VM, from the node.
    #[error("{0}")]
    Claim(#[source] ClaimError),
    /// No head within the template's time.
    #[error("the function sent no answer within {timeout:?}: make it faster, or raise `timeout` in its template.toml")]
    Timeout { timeout: Duration },
    /// The function's connection ended, or what came was not HTTP.
    #[error("the function broke the request off: {reason}; the node's log has its console under this request's id")]
    Function { reason: String },
    /// A build was refused before it began.
    #[error("the template was not built: {0}")]
    Build(#[source] BuildFailure),
    /// Our bug.
    #[error("the gateway failed: report it with what its log says under this request's id")]
    Panicked,
    /// Something could not be done to a sandbox.
    #[error("{0}")]
    Sandbox(#[source] SandboxError),
    /// A body of JSON that is none, or not the right one.
    #[error("the body is not understood: {reason}")]
    Body { reason: String },
    /// A template was not removed.
    #[error("{0}")]
    Remove(#[source] RemoveError),
}

impl ApiError {
    pub(crate) const fn status(&self) -> StatusCode {
        match self {
            Self::NoRoute { .. }
            | Self::UnknownTemplate { .. }
            | Self::Claim(ClaimError::UnknownTemplate(_))
            | Self::SetPool(SetPoolError::UnknownTemplate(_))
            | Self::Remove(RemoveError::Unknown(_)) => StatusCode::NOT_FOUND,
            Self::Key => StatusCode::UNAUTHORIZED,
            Self::Sandbox(error) => sandbox_status(error).0,
            Self::Method { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::Path { .. }
            | Self::Query { .. }
            | Self::Body { .. }
            | Self::BodyCut
            | Self::SetPool(SetPoolError::Invalid(_))
            | Self::Build(BuildFailure::Invalid { .. }) => StatusCode::BAD_REQUEST,
            Self::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::MediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Claim(
                ClaimError::Exhausted { .. } | ClaimError::NoCapacity { .. } | ClaimError::Concurrency { .. },
            ) => StatusCode::TOO_MANY_REQUESTS,
            Self::Claim(ClaimError::Broken { .. }) | Self::SetPool(SetPoolError::Store(_)) => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::Timeout { .. } => StatusCode::GATEWAY_TIMEOUT,
            Self::Function { .. } => StatusCode::BAD_GATEWAY,
            Self::Build(BuildFailure::NoCapacity { .. }) => StatusCode::INSUFFICIENT_STORAGE,
            Self::Build(BuildFailure::NotReady { .. }) => StatusCode::UNPROCESSABLE_ENTITY,
            Self::Panicked | Self::Build(BuildFailure::Platform { .. }) | Self::Remove(RemoveError::Files { .. }) => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
        }
    }

    /// For programs.
    pub(crate) const fn code(&self) -> &'static str {
        match self {
            Self::NoRoute { .. } => "not_found",
            Self::Method { .. } => "method_not_allowed",
            Self::UnknownTemplate { .. }
            | Self::Claim(ClaimError::UnknownTemplate(_))
            | Self::SetPool(SetPoolError::UnknownTemplate(_))
            | Self::Remove(RemoveError::Unknown(_)) => "unknown_template",
            Self::Key => "unauthorized",
            Self::SetPool(SetPoolError::Store(_)) => "not_stored",
            Self::Sandbox(error) => sandbox_status(error).1,
            Self::Body { .. } | Self::SetPool(SetPoolError::Invalid(_)) => "invalid",
            Self::Path { .. } => "invalid_path",
            Self::Query { .. } => "invalid_query",
            Self::TooLarge { .. } => "body_too_large",
            Self::BodyCut => "body_incomplete",
            Self::MediaType => "unsupported_media_type",
            Self::Claim(ClaimError::Exhausted { .. }) => "exhausted",
            Self::Claim(ClaimError::NoCapacity { .. }) => "no_capacity",
            Self::Claim(ClaimError::Concurrency { .. }) => "concurrency",
            Self::Claim(ClaimError::Broken { .. }) => "template_broken",
            Self::Timeout { .. } => "function_timeout",
            Self::Function { .. } => "function_failed",
            Self::Build(BuildFailure::Invalid { .. }) => "invalid",
            Self::Build(BuildFailure::NoCapacity { .. }) => "no_capacity",
            Self::Build(BuildFailure::NotReady { .. }) => "not_ready",
            Self::Build(BuildFailure::Platform { .. }) => "platform",
            Self::Panicked => "internal",
            Self::Remove(RemoveError::Files { .. }) => "remove_failed",
        }
    }

    /// Fields beside code and message: the numbers, for programs.
    fn fields(&self) -> Map<String, Value> {
        let fields = match self {
            Self::UnknownTemplate { .. }
            | Self::Claim(ClaimError::UnknownTemplate(_))
            | Self::SetPool(SetPoolError::UnknownTemplate(_))
            | Self::Remove(RemoveError::Unknown(_)) => json!({ "list": TEMPLATES_URL }),
            Self::Claim(ClaimError::Concurrency { limit, .. }) => json!({ "limit": limit }),
            Self::TooLarge { limit } => json!({ "limit": limit }),
            Self::Sandbox(SandboxError::State { state, .. }) => {
                json!({ "state": state, "allowed": allowed_of_sandbox(*state) })
            }
            Self::Build(failure) => serde_json::to_value(failure).unwrap_or_default(),
            Self::Claim(ClaimError::NoCapacity { full, .. })
            | Self::Sandbox(
                SandboxError::NoCapacity { full, .. } | SandboxError::Claim(ClaimError::NoCapacity { full, .. }),
            ) => serde_json::to_value(full).unwrap_or_default(),
            _ => Value::Null,
        };
        match fields {
            Value::Object(fields) => fields,
            _ => Map::new(),
        }
    }

    const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Claim(
                ClaimError::Exhausted { retry_after, .. }
                | ClaimError::NoCapacity { retry_after, .. }
                | ClaimError::Concurrency { retry_after, .. },
            )
            | Self::Build(BuildFailure::NoCapacity { retry_after, .. })
            | Self::Sandbox(
                SandboxError::NoCapacity { retry_after, .. }
                | SandboxError::Claim(
                    ClaimError::Exhausted { retry_after, .. }
                    | ClaimError::NoCapacity { retry_after, .. }
                    | ClaimError::Concurrency { retry_after, .. },
                ),
            ) => Some(*retry_after),
            Self::Claim(ClaimError::Broken { .. })
            | Self::SetPool(SetPoolError::Store(_))
            | Self::Sandbox(
                SandboxError::Claim(ClaimError::Broken { .. })
                | SandboxError::NotDone { .. }
                | SandboxError::Store { .. }
                | SandboxError::Late { .. },
            ) => Some(BROKEN_RETRY),
            _ => None,
        }
    }

    /// Writes this into `response`, keeping the headers that it has.
    pub(crate) fn render(&self, response: &mut Response, id: &RequestId) {
        let mut error = self.fields();
        error.insert("code".into(), self.code().into());
        error.insert("message".into(), self.to_string().into());
        let body = json!({ "error": error, "request_id": id.as_str() });

        *response.status_mut() = self.status();
        *response.body_mut() = Body::from(format!("{body}\n"));
        let headers = response.headers_mut();
        headers.remove(header::CONTENT_LENGTH);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(after) = self.retry_after() {
            let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        if matches!(self, Self::Key) {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("ApiKey header=\"X-API-Key\""));
        }
        if matches!(self, Self::Function { .. } | Self::Timeout { .. } | Self::Sandbox(SandboxError::Guest { .. })) {
            headers.insert(FAILED_COMPONENT, HeaderValue::from_static("function"));
        }
    }
}

const fn sandbox_status(error: &SandboxError) -> (StatusCode, &'static str) {
    match error {
        SandboxError::Unknown { .. } => (StatusCode::NOT_FOUND, "unknown_sandbox"),
        SandboxError::State { .. } => (StatusCode::CONFLICT, "wrong_state"),
        SandboxError::Invalid { .. } => (StatusCode::BAD_REQUEST, "invalid"),
        SandboxError::Claim(ClaimError::UnknownTemplate(_)) => (StatusCode::NOT_FOUND, "unknown_template"),
        SandboxError::Claim(ClaimError::Exhausted { .. }) => (StatusCode::TOO_MANY_REQUESTS, "exhausted"),
        SandboxError::NoCapacity { .. } | SandboxError::Claim(ClaimError::NoCapacity { .. }) => {
            (StatusCode::TOO_MANY_REQUESTS, "no_capacity")
        }
        SandboxError::Claim(ClaimError::Concurrency { .. }) => (StatusCode::TOO_MANY_REQUESTS, "concurrency"),
        SandboxError::Claim(ClaimError::Broken { .. }) => (StatusCode::SERVICE_UNAVAILABLE, "template_broken"),
        SandboxError::Gone { .. } => (StatusCode::GONE, "gone"),
        SandboxError::Cut { .. } => (StatusCode::CONFLICT, "cut"),
        SandboxError::Guest { .. } => (StatusCode::BAD_GATEWAY, "guest_failed"),
        SandboxError::Command { .. } => (StatusCode::CONFLICT, "command_refused"),
        SandboxError::NoExec { .. } => (StatusCode::NOT_IMPLEMENTED, "no_exec"),
        SandboxError::NotDone { .. } => (StatusCode::SERVICE_UNAVAILABLE, "not_done"),
        SandboxError::Store { .. } => (StatusCode::SERVICE_UNAVAILABLE, "store_unavailable"),
        SandboxError::MayHaveRun { .. } => (StatusCode::GATEWAY_TIMEOUT, "may_have_run"),
        SandboxError::Late { .. } => (StatusCode::GATEWAY_TIMEOUT, "late"),
    }
}

/// A blank response that carries the error; `front`, which knows the request's id, renders it.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status().into_response();
        response.extensions_mut().insert(Arc::new(self));
        response
    }
}
