//! Connections and routes.

use std::convert::Infallible;

use axum::{
    Extension, Router,
    extract::Request,
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
    serve::Listener,
};
use http::{Method, StatusCode, Uri};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use tower::ServiceExt;

use crate::{access, answer::Refusal, envd::Envd, files, filesystem, process, system};

/// Most bytes of a request's address and headers: more is 431.
const HEAD: usize = 64 * 1024;
/// Most bytes that are read in search of a head's end.
const BUFFER: usize = 4 * HEAD;

/// Whose requests come through a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Door {
    /// Anybody's who reaches the guest, and its own processes': `/init` needs the token that is set.
    Public,
    /// The node's alone: `/init` may replace the token.
    Owner,
}

/// Answers all requests of a listener, for ever. On a thread that runs tokio, in its `current_thread` flavour or any other.
pub async fn serve(mut listener: impl Listener, envd: Envd, door: Door) -> Infallible {
    let router = router(envd, door);
    loop {
        let (stream, _) = listener.accept().await;
        let router = router.clone();
        tokio::spawn(async move {
            let service = service_fn(move |request: Request<Incoming>| router.clone().oneshot(request));
            // A connection that breaks is its client's affair, and so is one that is idle: whoever keeps it for later finds it open.
            let _ = http1::Builder::new().max_buf_size(BUFFER).serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

fn router(envd: Envd, door: Door) -> Router {
    Router::new()
        .merge(process::routes())
        .merge(filesystem::routes())
        .merge(files::routes())
        .merge(system::routes())
        .fallback(unknown)
        .method_not_allowed_fallback(not_allowed)
        .layer(from_fn_with_state(envd.clone(), access::check))
        .layer(from_fn(limit_head))
        .layer(Extension(door))
        .with_state(envd)
}

async fn limit_head(request: Request, next: Next) -> Response {
    let headers: usize = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    let path = request.uri().path_and_query().map_or(0, |path| path.as_str().len());
    if headers + path > HEAD {
        let message = format!("the request's head is larger than {HEAD} bytes");
        return Refusal::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, message).into_response();
    }
    next.run(request).await
}

async fn unknown(uri: Uri) -> Response {
    Refusal::new(StatusCode::NOT_FOUND, format!("nothing is served at {}", uri.path())).into_response()
}

async fn not_allowed(method: Method, uri: Uri) -> Response {
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, format!("{method} is not a method of {}", uri.path())).into_response()
}
