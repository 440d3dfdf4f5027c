//! How the node is.

use axum::{Json, extract::State, response::IntoResponse};
use http::header;
use serde_json::{Value, json};

use stasis_pool_api::Capacity;

use super::Api;
use crate::metrics::without_gone;

pub(super) async fn health() -> Json<Value> {
    Json(json!({ "status": "ok" }))
}

pub(super) async fn metrics(State(api): State<Api>) -> impl IntoResponse {
    let is_there = |name: &str| name.parse().is_ok_and(|name| api.node.knows(&name));
    let text = without_gone(&api.metrics.render(), is_there);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}

pub(super) async fn capacity(State(api): State<Api>) -> Json<Capacity> {
    Json(api.node.capacity())
}
