//! Pools: the caller's own, and their settings.

use axum::{
    Extension, Json,
    extract::{Path, Request, State},
};
use serde_json::{Value, json};
use stasis_pool_api::{PoolPatch, PoolStatus, TemplateName, Tenant};

use super::{
    Api,
    sandboxes::{body, parse},
    templates,
};
use crate::error::ApiError;

type Answer = Result<Json<PoolStatus>, ApiError>;

pub(super) async fn list(State(api): State<Api>, Extension(tenant): Extension<Tenant>) -> Json<Value> {
    Json(json!({ "pools": api.node.pools(&tenant).await }))
}

pub(super) async fn show(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    Path(name): Path<String>,
) -> Answer {
    let found: TemplateName = templates::parse(&name)?;
    api.node.pool(&tenant, &found).await.map(Json).ok_or(ApiError::UnknownTemplate { name })
}

pub(super) async fn set(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    Path(name): Path<String>,
    request: Request,
) -> Answer {
    let name: TemplateName = templates::parse(&name)?;
    let patch: PoolPatch = parse(&body(request).await?)?;
    let status = api.node.set_pool(&tenant, &name, patch).await.map_err(ApiError::SetPool)?;
    tracing::info!(template = %name, %tenant, settings = ?status.settings, "a pool was set");
    Ok(Json(status))
}
