//! One invocation: a VM is claimed, the request goes in, the answer streams out, the VM goes. A request to a sandbox is the same, but
//! that the claim is of the sandbox's own VM, which stays.
//!
//! ```text
//! target ─▶ claim (the body's beginning is read meanwhile) ─▶ send ─▶ head ─▶ [small answers: whole] ─▶ stream
//!   404/413      404/429/503                                  502/504/413         502                    cut
//! ```
//! The caller may leave at any point: hyper drops the future or the body, and with it the claim, the guest's connection and the
//! lease.

mod answer;
mod forward;
mod guest;
mod guest_io;
mod headers;
mod target;
mod timing;
mod wire;

use std::net::IpAddr;

use axum::response::{IntoResponse as _, Response};
use futures_util::{FutureExt as _, TryFutureExt as _, future::BoxFuture};
use http::{Request, StatusCode};
use hyper::body::Incoming;
use stasis_pool_api::{Claim, SandboxError, TemplateName, Tenant};

use self::{answer::Answer, guest::Guest, target::Target};
use crate::{error::ApiError, events::Invocation, front::Front, request_id::RequestId, upload::Upload};

pub(crate) const PREFIX: &str = "/invoke/";
pub(crate) const SANDBOX_PREFIX: &str = "/sandbox/";
/// How much of a body is read before there is a VM for it. A body that has arrived lets hyper see that its caller left.
const READ_AHEAD: usize = 64 << 10;

pub(crate) async fn invoke(
    front: &Front,
    tenant: &Tenant,
    request: Request<Incoming>,
    peer: IpAddr,
    id: &RequestId,
) -> Response {
    let target = Target::of(request.uri());
    let template = if target.is_sandbox {
        front.node.sandboxes(tenant).template_of(&target.name)
    } else {
        target.name.parse::<TemplateName>().ok().filter(|name| front.node.knows(name))
    };
    let mut call =
        Invocation::begin(&front.series, id.clone(), request.method().clone(), request.uri().path(), template.as_ref());
    if target.is_sandbox {
        call = call.in_sandbox(&target.name);
    }

    let exchanged = match template {
        Some(template) => exchange(front, (tenant, &template), &target, request, peer, &mut call).await,
        None => {
            // Dropped as an upload, so that the caller gets to read the answer.
            let (head, body) = request.into_parts();
            drop(Upload::new(&head.headers, body, 0));
            let name = target.name.chars().take(80).collect();
            Err(if target.is_sandbox {
                ApiError::Sandbox(SandboxError::Unknown { id: name })
            } else {
                ApiError::UnknownTemplate { name }
            })
        }
    };
    match exchanged {
        Ok(answer) => answer.deliver(call),
        Err(error) => {
            if matches!(error.status(), StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
                call.shed(error.code());
            }
            if !matches!(error, ApiError::BodyCut) {
                call.ended(error.status());
            }
            let mut response = error.into_response();
            timing::stamp(response.headers_mut(), &call);
            response
        }
    }
}

async fn exchange(
    front: &Front,
    (tenant, template): (&Tenant, &TemplateName),
    target: &Target,
    request: Request<Incoming>,
    peer: IpAddr,
    call: &mut Invocation,
) -> Result<Answer, ApiError> {
    let (head, body) = request.into_parts();
    let mut upload = Upload::new(&head.headers, body, front.config.max_body);
    upload.check_declared()?;
    let watch = upload.watch();
    let request = forward::head(head, target, peer, call.id())?;

    let sandboxes = target.is_sandbox.then(|| front.node.sandboxes(tenant));
    let claiming = match &sandboxes {
        Some(sandboxes) => sandboxes.visit(&target.name, front.config.claim_budget).map_err(ApiError::Sandbox).boxed(),
        None => front.node.claim(tenant, template, front.config.claim_budget).map_err(ApiError::Claim).boxed(),
    };
    let Claim { template, stream, lease, .. } = claim(claiming, &mut upload, call).await?;
    let mut guest = Guest::connect(stream, lease, watch, call.id().clone()).await?;
    let answer = guest.send(request.map(|()| upload), template.spec.timeout).await?;
    call.answered(answer.took);
    answer.settle(guest).await
}

/// Claims, and reads the beginning of the body meanwhile.
async fn claim(
    mut claiming: BoxFuture<'_, Result<Claim, ApiError>>,
    upload: &mut Upload<Incoming>,
    call: &mut Invocation,
) -> Result<Claim, ApiError> {
    call.waits(true);
    let claimed = tokio::select! {
        biased;
        claimed = &mut claiming => claimed,
        read = upload.read_ahead(READ_AHEAD) => {
            read?;
            claiming.await
        }
    };
    call.waits(false);
    let claim = claimed?;
    call.claimed(&claim);
    Ok(claim)
}
