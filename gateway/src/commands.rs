//! What is done through the API: a log line for each request that may change something.

use std::time::Instant;

use axum::response::Response;
use http::{Method, Request};
use stasis_pool_api::{SandboxId, SandboxInfo, Tenant};

use crate::{request_id::RequestId, routes::SANDBOXES_URL};

/// The sandboxes that a request has made. A response carries it to the log.
#[derive(Debug, Clone)]
pub(crate) struct Made(Vec<SandboxId>);

impl Made {
    pub(crate) fn of(sandboxes: &[SandboxInfo]) -> Self {
        Self(sandboxes.iter().map(|sandbox| sandbox.id.clone()).collect())
    }
}

/// A request that may change something.
pub(crate) struct Command {
    tenant: Tenant,
    method: Method,
    path: String,
    begun: Instant,
}

impl Command {
    /// None for one that only looks.
    pub(crate) fn of<B>(request: &Request<B>, tenant: &Tenant) -> Option<Self> {
        (!request.method().is_safe()).then(|| Self {
            tenant: tenant.clone(),
            method: request.method().clone(),
            path: request.uri().path().to_owned(),
            begun: Instant::now(),
        })
    }

    /// It has been answered, or has begun to be: a build and a command go on behind their answer's head.
    pub(crate) fn answered(self, response: &mut Response, id: &RequestId) {
        let made = response.extensions_mut().remove::<Made>().map(|Made(ids)| {
            let ids: Vec<_> = ids.iter().map(SandboxId::as_str).collect();
            ids.join(" ")
        });
        tracing::info!(
            request_id = %id,
            tenant = %self.tenant,
            method = %self.method,
            path = %self.path,
            sandbox = sandbox(&self.path),
            made,
            status = response.status().as_u16(),
            took_ms = (self.begun.elapsed().as_secs_f64() * 1e6).round() / 1e3,
            "command"
        );
    }
}

/// The sandbox of a path, as it is written there.
fn sandbox(path: &str) -> Option<&str> {
    path.strip_prefix(SANDBOXES_URL)?.strip_prefix('/')?.split('/').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sandbox_is_in_the_path() {
        for (path, id) in [
            ("/v1/sandboxes/sb-1/hold/x", Some("sb-1")),
            ("/v1/sandboxes/sb-1", Some("sb-1")),
            ("/v1/sandboxes", None),
            ("/v1/templates/x", None),
        ] {
            assert_eq!(sandbox(path), id, "{path}");
        }
    }
}
