//! How the node is.

use axum::{Json, extract::State, response::IntoResponse};
use http::header;
use serde_json::{Value, json};

use super::Api;

pub(super) async fn health() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

pub(super) async fn metrics(State(api): State<Api>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], api.metrics.render())
}
