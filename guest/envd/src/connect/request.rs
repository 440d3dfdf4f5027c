//! Requests: their heads, and the messages in them.

use std::fmt::Display;

use axum::{
    body::{Body, to_bytes},
    extract::Request,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use http::{
    HeaderMap, HeaderValue, StatusCode,
    header::{CONTENT_ENCODING, CONTENT_TYPE},
};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    answer::{self, Refusal},
    connect::{
        Code, RpcError,
        frame::{self, Frames, LARGEST},
    },
};

/// A call with one message each way.
pub(crate) async fn unary<In, Out, Fut>(request: Request, call: impl FnOnce(HeaderMap, In) -> Fut) -> Response
where
    In: DeserializeOwned,
    Out: Serialize,
    Fut: Future<Output = Result<Out, RpcError>>,
{
    if let Some(refusal) = other_type(request.headers(), "application/json") {
        return refusal;
    }
    let (parts, body) = request.into_parts();
    let answered = async {
        check(&parts.headers, CONTENT_ENCODING.as_str())?;
        let bytes = to_bytes(body, LARGEST).await.map_err(unread)?;
        call(parts.headers, parse(&bytes)?).await
    };
    match answered.await {
        Ok(value) => answer::json(StatusCode::OK, &value),
        Err(error) => error.into_unary(),
    }
}

/// A call that answers frames, of which `call` makes all but the last on success.
pub(crate) async fn stream<Out, Fut>(request: Request, call: impl FnOnce(HeaderMap, Frames) -> Fut) -> Response
where
    Out: Stream<Item = Bytes> + Send + 'static,
    Fut: Future<Output = Result<Out, RpcError>>,
{
    if let Some(refusal) = other_type(request.headers(), "application/connect+json") {
        return refusal;
    }
    let (parts, body) = request.into_parts();
    let answered = async {
        check(&parts.headers, "connect-content-encoding")?;
        call(parts.headers, Frames::new(body)).await
    };
    match answered.await {
        Ok(frames) => frame::response(Body::from_stream(frames.map(Ok::<_, std::convert::Infallible>))),
        Err(error) => error.into_stream(),
    }
}

/// The one message of a request of frames.
pub(crate) async fn first<In: DeserializeOwned>(frames: &mut Frames) -> Result<In, RpcError> {
    let Some(message) = frames.next().await? else {
        return Err(RpcError::invalid("protocol error: the request has no message"));
    };
    parse(&message)
}

/// A message from its JSON.
pub(crate) fn parse<In: DeserializeOwned>(bytes: &[u8]) -> Result<In, RpcError> {
    // What is skipped is not looked at by the parser.
    let text = std::str::from_utf8(bytes).map_err(|_| RpcError::invalid("unmarshal message: invalid UTF-8"))?;
    serde_json::from_str(text).map_err(|error| RpcError::invalid(format!("unmarshal message: {error}")))
}

fn unread(error: impl Display) -> RpcError {
    let text = error.to_string();
    if text.contains("length limit") {
        return RpcError::new(Code::ResourceExhausted, format!("message is larger than configured max {LARGEST}"));
    }
    RpcError::invalid(format!("the request broke off: {text}"))
}

/// A refusal where the request's type is not this one.
fn other_type(headers: &HeaderMap, wanted: &'static str) -> Option<Response> {
    let given = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case(wanted) {
        return None;
    }
    let message = format!("unsupported content type '{given}', expected {wanted}");
    let mut response = Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message).into_response();
    response.headers_mut().insert("accept-post", HeaderValue::from_static(wanted));
    Some(response)
}

/// The version of the protocol, and that nothing is compressed.
fn check(headers: &HeaderMap, encoding: &str) -> Result<(), RpcError> {
    if let Some(version) = headers.get("connect-protocol-version")
        && version != "1"
    {
        let version = String::from_utf8_lossy(version.as_bytes()).into_owned();
        return Err(RpcError::invalid(format!("connect-protocol-version must be \"1\": got \"{version}\"")));
    }
    match headers.get(encoding) {
        Some(encoding) if encoding != "identity" => {
            let encoding = String::from_utf8_lossy(encoding.as_bytes()).into_owned();
            Err(RpcError::new(
                Code::Unimplemented,
                format!("unknown compression \"{encoding}\": supported encodings are identity"),
            ))
        }
        _ => Ok(()),
    }
}
