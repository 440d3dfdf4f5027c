//! Who may ask, and as whom.

use std::fmt;

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use http::{HeaderMap, Method, StatusCode, header::AUTHORIZATION};
use sha2::{Digest, Sha256};

use crate::{
    answer::Refusal,
    connect::{Code, RpcError},
    envd::Envd,
    users::User,
};

/// The header that brings the token.
pub(crate) const HEADER: &str = "x-access-token";
const REFUSED: &str = "unauthorized access, please provide a valid access token or method signing if supported";

/// The access token. It shows itself to nobody.
#[derive(Clone)]
pub(crate) struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Token {
    pub(crate) fn new(token: String) -> Self {
        Self(token)
    }

    /// What it is, for signing.
    pub(crate) fn secret(&self) -> &str {
        &self.0
    }

    /// Whether it is this one: digests are compared, so that the time tells nothing of how far it is right.
    pub(crate) fn is(&self, other: &[u8]) -> bool {
        Sha256::digest(self.0.as_bytes()) == Sha256::digest(other)
    }
}

/// What a request without a token may reach, even where one is set: what proves itself otherwise.
fn is_open(method: &Method, path: &str) -> bool {
    matches!((method.as_str(), path), ("GET", "/health" | "/files") | ("POST", "/files" | "/init"))
}

/// Lets pass who has the token.
pub(crate) async fn check(State(envd): State<Envd>, request: Request, next: Next) -> Response {
    let token = envd.settings().token.clone();
    let passes = token.is_none_or(|token| {
        is_open(request.method(), request.uri().path())
            || request.headers().get(HEADER).is_some_and(|given| token.is(given.as_bytes()))
    });
    if passes { next.run(request).await } else { Refusal::new(StatusCode::UNAUTHORIZED, REFUSED).into_response() }
}

/// Whom a Connect call is for: the name of `Authorization: Basic`, else the default user.
pub(crate) fn user(envd: &Envd, headers: &HeaderMap) -> Result<User, RpcError> {
    let name = basic_name(headers);
    envd.user(name.as_deref()).map_err(|unknown| {
        let which = if name.is_some() { "username" } else { "default user" };
        RpcError::new(Code::Unauthenticated, format!("invalid {which}: '{unknown}'"))
    })
}

/// The name, where the header is whole. What is not Basic is as good as none.
fn basic_name(headers: &HeaderMap) -> Option<String> {
    let header = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, credentials) = header.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let text = String::from_utf8(STANDARD.decode(credentials.trim()).ok()?).ok()?;
    Some(text.split_once(':')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_from_a_whole_basic_header_only() {
        for (header, wanted) in [
            ("Basic cm9vdDo=", Some("root")),
            ("basic cm9vdDpwdw==", Some("root")),
            ("Basic cm9vdA==", None),
            ("Basic ????", None),
            ("Basic /w==", None),
            ("Bearer cm9vdDo=", None),
            ("Basic", None),
        ] {
            let headers = HeaderMap::from_iter([(AUTHORIZATION, header.parse().unwrap())]);
            assert_eq!(basic_name(&headers).as_deref(), wanted, "{header}");
        }
    }

    #[test]
    fn a_token_does_not_show_itself() {
        let token = Token::new("s3cret".into());
        assert_eq!(format!("{token:?}"), "Token(…)");
        assert!(token.is(b"s3cret") && !token.is(b"s3cre") && !token.is(b""));
    }
}
