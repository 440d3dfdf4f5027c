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
use stasis_pool_api::{Node, Tenant};
use tower::ServiceExt as _;

use crate::{
    commands::Command,
    config::Config,
    error::ApiError,
    invoke,
    metrics::AllSeries,
    request_id::{self, RequestId},
    routes,
    upload::Upload,
};

/// What all connections share.
pub(crate) struct Front {
    pub(crate) node: Arc<dyn Node>,
    pub(crate) config: Config,
    pub(crate) api: Router,
    pub(crate) series: Arc<AllSeries>,
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

    async fn dispatch(&self, mut request: Request<Incoming>, peer: IpAddr, id: &RequestId) -> Response {
        let tenant = match self.config.tenants.admit(request.headers_mut()) {
            Ok(tenant) => tenant,
            Err(_) if routes::is_open(request.uri().path()) => Tenant::default(),
            Err(refused) => {
                // Dropped as an upload, so that the caller gets to read the answer.
                let (head, body) = request.into_parts();
                drop(Upload::new(&head.headers, body, 0));
                return refused.into_response();
            }
        };
        let path = request.uri().path();
        if path.starts_with(invoke::PREFIX) || path.starts_with(invoke::SANDBOX_PREFIX) {
            // Not through axum: it would touch the function's heads and bodies.
            invoke::invoke(self, &tenant, request, peer, id).await
        } else {
            let command = Command::of(&request, &tenant);
            request.extensions_mut().insert(tenant);
            let mut response = match self.api.clone().oneshot(request.map(Body::new)).await {
                Ok(response) => response,
                Err(never) => match never {},
            };
            if let Some(command) = command {
                command.answered(&mut response, id);
            }
            response
        }
    }
}
