//! Signed addresses: who has one may do what it says, without the token.

use std::time::{Duration, SystemTime};

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use http::{HeaderMap, StatusCode};
use sha2::{Digest, Sha256};

use crate::{
    access::{HEADER, Token},
    answer::Refusal,
    files::target::Query,
};

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Read,
    Write,
}

/// Lets pass who has the token or a signature for just this.
pub(super) fn check(
    token: Option<&Token>,
    headers: &HeaderMap,
    query: &Query,
    operation: Operation,
    now: SystemTime,
) -> Result<(), Refusal> {
    let Some(token) = token else { return Ok(()) };
    let refused = |message: &str| Refusal::new(StatusCode::UNAUTHORIZED, message);
    match headers.get(HEADER) {
        Some(given) if !given.is_empty() => {
            return if token.is(given.as_bytes()) {
                Ok(())
            } else {
                Err(refused("access token present in header but does not match"))
            };
        }
        _ => {}
    }
    let signature = query.signature.as_deref().ok_or_else(|| refused("missing signature query parameter"))?;
    if !Token::new(sign(token, query, operation)).is(signature.as_bytes()) {
        return Err(refused("invalid signature"));
    }
    let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    if query.expiration.is_some_and(|end| u64::try_from(end).map_or(true, |end| end < now)) {
        return Err(refused("signature is already expired"));
    }
    Ok(())
}

/// `v1_` and a digest of all that it allows, and of the token.
fn sign(token: &Token, query: &Query, operation: Operation) -> String {
    let operation = match operation {
        Operation::Read => "read",
        Operation::Write => "write",
    };
    let (path, user) = (query.path.as_deref().unwrap_or_default(), query.username.as_deref().unwrap_or_default());
    let mut text = format!("{path}:{operation}:{user}:{}", token.secret());
    if let Some(expiration) = query.expiration {
        text = format!("{text}:{expiration}");
    }
    format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text.as_bytes())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_what_the_sdks_make() {
        let token = Token::new("0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0".into());
        let query = Query { path: Some("hello.txt".into()), username: Some("user".into()), ..Query::default() };
        assert_eq!(sign(&token, &query, Operation::Read), "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E");
    }

    #[test]
    fn a_signature_holds_for_what_it_was_made_for_until_its_end() {
        let token = Token::new("t".into());
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let mut query = Query { path: Some("a".into()), expiration: Some(100), ..Query::default() };
        query.signature = Some(sign(&token, &query, Operation::Read));
        let checked = |query: &Query, operation, now| {
            check(Some(&token), &HeaderMap::new(), query, operation, now).map_err(|refusal| refusal.message)
        };
        assert_eq!(checked(&query, Operation::Read, at(100)), Ok(()));
        assert_eq!(checked(&query, Operation::Read, at(101)), Err("signature is already expired".into()));
        assert_eq!(checked(&query, Operation::Write, at(1)), Err("invalid signature".into()));
        for other in [
            Query { path: Some("b".into()), ..query.clone() },
            Query { username: Some("root".into()), ..query.clone() },
            Query { expiration: Some(101), ..query.clone() },
            Query { expiration: None, ..query.clone() },
            Query { signature: Some(String::new()), ..query.clone() },
        ] {
            assert_eq!(checked(&other, Operation::Read, at(1)), Err("invalid signature".into()), "{other:?}");
        }
        let none = Query { signature: None, ..query };
        assert_eq!(checked(&none, Operation::Read, at(1)), Err("missing signature query parameter".into()));
    }
}
