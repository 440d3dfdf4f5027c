//! How the node is.

use axum::{Json, extract::State, response::IntoResponse};
use http::header;
use serde_json::{Value, json};

use stasis_pool_api::Capacity;

use super::Api;

pub(super) async fn health() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

pub(super) async fn metrics(State(api): State<Api>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], api.metrics.render())
}

pub(super) async fn pools(State(api): State<Api>) -> Json<Value> {
    Json(json!({ "pools": api.node.pools().await }))
}

pub(super) async fn capacity(State(api): State<Api>) -> Json<Capacity> {
    Json(api.node.capacity())
}
