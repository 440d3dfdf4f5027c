//! Every request's first and last station: its id, and the choice between a function and the API.

use std::{net::IpAddr, panic::AssertUnwindSafe, sync::Arc};

use axum::{
    Router,
    body::Body,
    response::{IntoResponse as _, Response},
};
use futures_util::FutureExt as _;
use http::Request;
use hyper::body::Incoming;
use stasis_pool_api::Node;
use tower::ServiceExt as _;

use crate::{
    config::Config,
    error::ApiError,
    invoke,
    request_id::{self, RequestId},
};

/// What all connections share.
pub(crate) struct Front {
    pub(crate) node: Arc<dyn Node>,
    pub(crate) config: Config,
    pub(crate) api: Router,
}

impl Front {
    pub(crate) async fn answer(&self, request: Request<Incoming>, peer: IpAddr) -> Response {
        let id = RequestId::of(request.headers());
        // A bug must not cost the callers that share this connection their answers.
        let dispatched = AssertUnwindSafe(self.dispatch(request, peer, &id)).catch_unwind().await;
        let mut response = dispatched.unwrap_or_else(|_| ApiError::Panicked.into_response());
        if let Some(error) = response.extensions_mut().remove::<Arc<ApiError>>() {
            if error.status().is_server_error() {
                tracing::warn!(request_id = %id, %error, "request failed");
            }
            error.render(&mut response, &id);
        }
        response.headers_mut().insert(request_id::HEADER, id.header_value());
        response
    }

    async fn dispatch(&self, request: Request<Incoming>, peer: IpAddr, id: &RequestId) -> Response {
        let path = request.uri().path();
        if path.starts_with(invoke::PREFIX) || path.starts_with(invoke::SANDBOX_PREFIX) {
            // Not through axum: it would touch the function's heads and bodies.
            invoke::invoke(self, request, peer, id).await
        } else {
            match self.api.clone().oneshot(request.map(Body::new)).await {
                Ok(response) => response,
                Err(never) => match never {},
            }
        }
    }
}
