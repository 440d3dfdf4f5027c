//! The head of the request that the function gets.

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue, Request, Uri, Version, header, request::Parts, uri::PathAndQuery};

use super::{headers::strip_hop_by_hop, target::Target};
use crate::{
    error::ApiError,
    request_id::{self, RequestId},
};

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// `head` as HTTP/1.1 for the function, without a body.
pub(super) fn head(head: Parts, target: &Target, peer: IpAddr, id: &RequestId) -> Result<Request<()>, ApiError> {
    let path: PathAndQuery = target
        .path_and_query
        .parse()
        .map_err(|error: http::uri::InvalidUri| ApiError::Path { reason: error.to_string() })?;
    let mut headers = head.headers;
    let takes_trailers = lists(&headers, &header::TE, "trailers");
    // hyper decodes chunks and ignores a length beside them; so must the function.
    if headers.contains_key(header::TRANSFER_ENCODING) {
        headers.remove(header::CONTENT_LENGTH);
    }
    strip_hop_by_hop(&mut headers);
    // hyper has answered it.
    headers.remove(header::EXPECT);
    if takes_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    join_cookies(&mut headers);

    if !headers.contains_key(header::HOST) {
        let authority = head.uri.authority().map_or(target.name.as_str(), |authority| authority.as_str());
        if let Ok(host) = HeaderValue::from_str(authority) {
            headers.insert(header::HOST, host);
        }
    }
    if let Some(host) = headers.get(header::HOST).cloned() {
        headers.insert(FORWARDED_HOST, host);
    }
    headers.insert(FORWARDED_PROTO, HeaderValue::from_static("http"));
    forwarded_for(&mut headers, peer);
    headers.insert(request_id::HEADER, id.header_value());

    let mut request = Request::new(());
    *request.method_mut() = head.method;
    *request.uri_mut() = Uri::from(path);
    *request.version_mut() = Version::HTTP_11;
    *request.headers_mut() = headers;
    Ok(request)
}

/// The chain so far, and the peer. Only the last entry is what we saw.
fn forwarded_for(headers: &mut HeaderMap, peer: IpAddr) {
    let mut chain = joined(headers, &FORWARDED_FOR, b", ");
    if !chain.is_empty() {
        chain.extend_from_slice(b", ");
    }
    chain.extend_from_slice(peer.to_string().as_bytes());
    if let Ok(chain) = HeaderValue::from_bytes(&chain) {
        headers.insert(FORWARDED_FOR, chain);
    }
}

/// HTTP/2 may split a cookie header, HTTP/1.1 must not (RFC 9113, 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(header::COOKIE).iter().nth(1).is_some()
        && let Ok(cookies) = HeaderValue::from_bytes(&joined(headers, &header::COOKIE, b"; "))
    {
        headers.insert(header::COOKIE, cookies);
    }
}

fn joined(headers: &HeaderMap, name: &HeaderName, by: &[u8]) -> Vec<u8> {
    headers.get_all(name).iter().map(HeaderValue::as_bytes).collect::<Vec<_>>().join(by)
}

fn lists(headers: &HeaderMap, name: &HeaderName, item: &str) -> bool {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|one| one.trim().eq_ignore_ascii_case(item))
}
