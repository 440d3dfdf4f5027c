//! Templates: listing, building and removing them.

use std::io;

use axum::{
    Json,
    body::Body,
    extract::{Path, Query, Request, State, rejection::QueryRejection},
    response::IntoResponse,
};
use bytes::Bytes;
use futures_util::{Stream, stream};
use http::{HeaderMap, StatusCode, header};
use http_body_util::BodyStream;
use serde_json::{Value, json};
use stasis_pool_api::{BuildEvent, BuildEvents, BuildFailure, BuildOptions, TemplateInfo, TemplateName};

use super::Api;
use crate::{error::ApiError, upload::Upload};

pub(super) async fn list(State(api): State<Api>) -> Json<Value> {
    Json(json!({ "templates": api.node.templates() }))
}

pub(super) async fn show(State(api): State<Api>, Path(name): Path<String>) -> Result<Json<TemplateInfo>, ApiError> {
    let found = parse(&name)?;
    api.node.template(&found).map(Json).ok_or(ApiError::UnknownTemplate { name })
}

pub(super) async fn remove(State(api): State<Api>, Path(name): Path<String>) -> Result<StatusCode, ApiError> {
    let name = parse(&name)?;
    let removed = api.node.remove(&name).await;
    if !api.node.knows(&name) {
        api.series.forget(name.as_str());
    }
    removed.map_err(ApiError::Remove)?;
    tracing::info!(template = %name, "template removed");
    Ok(StatusCode::NO_CONTENT)
}

/// Refusals that need no VM are an error status; everything later is told in the stream of events, whose last line says how it
/// ended. The options are the query.
pub(super) async fn build(
    State(api): State<Api>,
    options: Result<Query<BuildOptions>, QueryRejection>,
    request: Request,
) -> Result<impl IntoResponse, ApiError> {
    let (head, body) = request.into_parts();
    let upload = Upload::new(&head.headers, body, api.config.max_archive);
    if !is_archive(&head.headers) {
        return Err(ApiError::MediaType);
    }
    let Query(options) = options.map_err(|error| ApiError::Query { reason: error.body_text() })?;
    upload.check_declared()?;
    let watch = upload.watch();
    let events = api.node.build(Box::pin(archive(upload)), options).await;
    // The node sees a cut archive as an invalid one.
    let events = events.map_err(|failure| watch.fault().map_or(ApiError::Build(failure), ApiError::from))?;
    let headers = [(header::CONTENT_TYPE, "application/x-ndjson"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, Body::from_stream(lines(events))))
}

pub(super) fn parse(name: &str) -> Result<TemplateName, ApiError> {
    name.parse().map_err(|_| ApiError::UnknownTemplate { name: name.chars().take(80).collect() })
}

fn is_archive(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    ["application/x-tar", "application/tar", "application/octet-stream"]
        .iter()
        .any(|one| kind.eq_ignore_ascii_case(one))
}

fn archive(upload: Upload<Body>) -> impl Stream<Item = io::Result<Bytes>> + Send {
    use futures_util::StreamExt as _;
    BodyStream::new(upload).filter_map(|frame| async move {
        match frame {
            Ok(frame) => frame.into_data().ok().map(Ok),
            Err(fault) => Some(Err(io::Error::other(fault))),
        }
    })
}

/// One JSON line per event. Where the node stops telling before the end, that is told.
fn lines(events: BuildEvents) -> impl Stream<Item = io::Result<Bytes>> + Send {
    stream::unfold(Some(events), |events| async move {
        let mut events = events?;
        let event = events.recv().await.unwrap_or_else(|| {
            BuildEvent::Failed(BuildFailure::Platform {
                reason: "the node stopped before the build's end".into(),
                console: String::new(),
            })
        });
        let line = serde_json::to_vec(&event).map_err(io::Error::other).map(|mut line| {
            line.push(b'\n');
            Bytes::from(line)
        });
        let more = matches!(event, BuildEvent::Step { .. });
        Some((line, more.then_some(events)))
    })
}
