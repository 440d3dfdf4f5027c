//! The daemon itself: whether it lives, what the guest uses, what it is told when a sandbox begins.

mod init;
mod metrics;

use axum::{
    Extension, Router,
    extract::State,
    response::Response,
    routing::{get, post},
};
use http::StatusCode;

use crate::{answer, envd::Envd, server::Door};

pub(crate) use metrics::LastTicks;

/// Where they are served.
pub(crate) fn routes() -> Router<Envd> {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics::answer))
        .route("/envs", get(envs))
        .route("/init", post(init::answer))
}

async fn health() -> StatusCode {
    StatusCode::NO_CONTENT
}

/// The variables that `/init` set: the code interpreter reads them.
async fn envs(State(envd): State<Envd>) -> Response {
    let envs = envd.settings().envs.clone();
    answer::json(StatusCode::OK, &envs)
}

/// The door that a request came through.
pub(crate) type Through = Extension<Door>;
