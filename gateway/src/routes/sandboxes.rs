//! Sandboxes: making, showing, pausing, resuming and killing them. Traffic to them is `crate::invoke`'s.

use std::time::Duration;

use axum::{
    Extension, Json,
    body::{Body, Bytes},
    extract::{Path, Query, Request, State, rejection::QueryRejection},
    response::IntoResponse,
};
use http::StatusCode;
use http_body_util::{BodyExt as _, Limited};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use stasis_pool_api::{Name, NewSandbox, PauseTo, SandboxError, SandboxInfo, SandboxState, Tenant, lasting};

use super::Api;
use crate::{commands::Made, error::ApiError};

/// Most bytes of a command's body. A new sandbox's metadata may be 16 KiB.
const MOST_BODY: usize = 64 << 10;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Filter {
    state: Option<SandboxState>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Pause {
    #[serde(default)]
    to: PauseTo,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Resume {
    #[serde(default, with = "humantime_serde")]
    timeout: Option<Duration>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Timeout {
    #[serde(with = "humantime_serde")]
    timeout: Duration,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewHold {
    name: Name,
    #[serde(default, with = "humantime_serde")]
    lasts: Option<Duration>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fork {
    #[serde(default = "one")]
    count: u32,
}

const fn one() -> u32 {
    1
}

type Answer = Result<Json<SandboxInfo>, ApiError>;

pub(super) async fn create(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<impl IntoResponse + use<>, ApiError> {
    let new: NewSandbox = parse(&body(request).await?)?;
    let made = api.node.sandboxes(&tenant).create(new, api.config.claim_budget).await.map_err(ApiError::Sandbox)?;
    Ok((StatusCode::CREATED, Extension(Made::of(std::slice::from_ref(&made))), Json(made)))
}

pub(super) async fn list(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    filter: Result<Query<Filter>, QueryRejection>,
) -> Result<Json<Value>, ApiError> {
    let Query(filter) = filter.map_err(|error| ApiError::Query { reason: error.body_text() })?;
    Ok(Json(json!({ "sandboxes": api.node.sandboxes(&tenant).list(filter.state).await })))
}

pub(super) async fn show(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
) -> Answer {
    told(api.node.sandboxes(&tenant).inspect(&id).await)
}

/// Killing one that is not there (any more) is a 404.
pub(super) async fn kill(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    api.node.sandboxes(&tenant).kill(&id).await.map_err(ApiError::Sandbox)?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn pause(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
    request: Request,
) -> Answer {
    let Pause { to } = parse(&body(request).await?)?;
    told(api.node.sandboxes(&tenant).pause(&id, to).await)
}

/// 200 if it ran, 201 if it had to be resumed.
pub(super) async fn resume(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
    request: Request,
) -> Result<(StatusCode, Json<SandboxInfo>), ApiError> {
    let Resume { timeout } = parse(&body(request).await?)?;
    check("timeout", timeout)?;
    let (info, resumed) = api.node.sandboxes(&tenant).resume(&id, timeout).await.map_err(ApiError::Sandbox)?;
    Ok((if resumed { StatusCode::CREATED } else { StatusCode::OK }, Json(info)))
}

pub(super) async fn timeout(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
    request: Request,
) -> Answer {
    let Timeout { timeout } = parse(&body(request).await?)?;
    check("timeout", Some(timeout))?;
    told(api.node.sandboxes(&tenant).timeout(&id, timeout).await)
}

pub(super) async fn hold(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
    request: Request,
) -> Answer {
    let NewHold { name, lasts } = parse(&body(request).await?)?;
    check("lasts", lasts)?;
    told(api.node.sandboxes(&tenant).hold(&id, name, lasts).await)
}

pub(super) async fn release(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    Path((id, name)): Path<(String, String)>,
) -> Answer {
    let name: Name =
        name.parse().map_err(|error: <Name as std::str::FromStr>::Err| invalid(format!("the hold's name: {error}")))?;
    told(api.node.sandboxes(&tenant).release(&id, name).await)
}

/// All children, or none.
pub(super) async fn fork(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
    request: Request,
) -> Result<impl IntoResponse + use<>, ApiError> {
    let Fork { count } = parse(&body(request).await?)?;
    let children = api.node.sandboxes(&tenant).fork(&id, count, api.config.claim_budget).await;
    let children = children.map_err(ApiError::Sandbox)?;
    Ok((StatusCode::CREATED, Extension(Made::of(&children)), Json(json!({ "sandboxes": children }))))
}

fn told(info: Result<SandboxInfo, SandboxError>) -> Answer {
    info.map(Json).map_err(ApiError::Sandbox)
}

const fn invalid(reason: String) -> ApiError {
    ApiError::Sandbox(SandboxError::Invalid { reason })
}

fn check(what: &str, duration: Option<Duration>) -> Result<(), ApiError> {
    duration.map_or(Ok(()), |duration| lasting(what, duration)).map_err(ApiError::Sandbox)
}

pub(super) async fn body(request: Request<Body>) -> Result<Bytes, ApiError> {
    read(request, MOST_BODY).await
}

/// A body of at most so many bytes.
pub(super) async fn read(request: Request<Body>, most: usize) -> Result<Bytes, ApiError> {
    match Limited::new(request.into_body(), most).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => Err(ApiError::TooLarge { limit: most as u64 }),
        Err(_) => Err(ApiError::BodyCut),
    }
}

/// An object; an empty body is an empty one. Nothing else is taken for one, be it a list, which serde would take for the values of its keys.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let body = if body.is_empty() { b"{}" } else { body };
    let parsed = if body.trim_ascii_start().starts_with(b"{") {
        serde_json::from_slice(body).map_err(|error| error.to_string())
    } else {
        Err(format!("it must be an object{}", keys::<T>()))
    };
    parsed.map_err(|reason| ApiError::Body { reason })
}

/// The keys of an object, in words. serde lists them where it refuses one that is unknown.
fn keys<T: DeserializeOwned>() -> String {
    let refused = serde_json::from_str::<T>(r#"{"?":0}"#).err().map(|error| error.to_string()).unwrap_or_default();
    let list = refused.split_once("expected ").and_then(|(_, rest)| rest.rsplit_once(" at line"));
    list.map_or_else(String::new, |(list, _)| {
        format!(" with, as far as they are wanted, {}", list.trim_start_matches("one of "))
    })
}
