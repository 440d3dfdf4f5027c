//! The node's API.

mod exec;
mod pools;
mod sandboxes;
mod status;
mod templates;

use std::sync::Arc;

use axum::{
    Router,
    routing::{delete, get, post},
};
use http::{Method, Uri};
use metrics_exporter_prometheus::PrometheusHandle;
use stasis_pool_api::Node;

use crate::{
    config::Config,
    error::{ApiError, TEMPLATES_URL},
    metrics::AllSeries,
};

/// Where the pools are.
const POOLS_URL: &str = "/v1/pools";
/// Where the sandboxes are.
pub(crate) const SANDBOXES_URL: &str = "/v1/sandboxes";

fn sandbox(verb: &str) -> String {
    format!("{SANDBOXES_URL}/{{id}}{verb}")
}

/// What the routes share.
#[derive(Clone)]
struct Api {
    node: Arc<dyn Node>,
    config: Config,
    metrics: PrometheusHandle,
    series: Arc<AllSeries>,
}

/// Answered without a key: they tell of the node, and of no tenant's doings but by number.
pub(crate) fn is_open(path: &str) -> bool {
    matches!(path, "/healthz" | "/metrics")
}

pub(crate) fn router(node: Arc<dyn Node>, config: Config, metrics: PrometheusHandle, series: Arc<AllSeries>) -> Router {
    Router::new()
        .route("/healthz", get(status::health))
        .route("/metrics", get(status::metrics))
        .route("/v1/capacity", get(status::capacity))
        .route(POOLS_URL, get(pools::list))
        .route(&format!("{POOLS_URL}/{{name}}"), get(pools::show).patch(pools::set))
        .route(TEMPLATES_URL, post(templates::build).get(templates::list))
        .route(&format!("{TEMPLATES_URL}/{{name}}"), get(templates::show).delete(templates::remove))
        .route(SANDBOXES_URL, post(sandboxes::create).get(sandboxes::list))
        .route(&sandbox(""), get(sandboxes::show).delete(sandboxes::kill))
        .route(&sandbox("/pause"), post(sandboxes::pause))
        .route(&sandbox("/resume"), post(sandboxes::resume))
        .route(&sandbox("/connect"), post(sandboxes::resume))
        .route(&sandbox("/fork"), post(sandboxes::fork))
        .route(&sandbox("/exec"), post(exec::exec))
        .route(&sandbox("/logs"), get(exec::logs))
        .route(&sandbox("/timeout"), post(sandboxes::timeout))
        .route(&sandbox("/hold"), post(sandboxes::hold))
        .route(&sandbox("/hold/{name}"), delete(sandboxes::release))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .with_state(Api { node, config, metrics, series })
}

async fn no_route(uri: Uri) -> ApiError {
    ApiError::NoRoute { path: uri.path().to_owned() }
}

async fn no_method(method: Method, uri: Uri) -> ApiError {
    ApiError::Method { method: method.to_string(), path: uri.path().to_owned() }
}
