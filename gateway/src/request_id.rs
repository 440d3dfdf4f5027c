//! The id by which a request is found again, in the answer, in the function and in the logs.

use std::{fmt, sync::Arc};

use http::{HeaderMap, HeaderName, HeaderValue};
use uuid::Uuid;

pub(crate) const HEADER: HeaderName = HeaderName::from_static("x-request-id");
const LONGEST: usize = 128;

/// The caller's id where it is sane, else a new one: 1 to 128 visible ASCII characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RequestId(Arc<str>);

impl RequestId {
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let own = headers.get(HEADER).and_then(|value| value.to_str().ok());
        match own.filter(|id| (1..=LONGEST).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())) {
            Some(id) => Self(id.into()),
            None => Self(Uuid::new_v4().to_string().into()),
        }
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn header_value(&self) -> HeaderValue {
        HeaderValue::from_str(&self.0).unwrap_or_else(|_| HeaderValue::from_static("invalid"))
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sane_ids_are_kept() {
        let id_for = |value: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(HEADER, HeaderValue::from_bytes(value).unwrap());
            RequestId::of(&headers).as_str().to_owned()
        };
        assert_eq!(id_for(b"trace-7/a"), "trace-7/a");
        for odd in [b"".as_slice(), b"a b", "ä".as_bytes(), &[b'x'; 129]] {
            assert!(id_for(odd).parse::<Uuid>().is_ok(), "{odd:?}");
        }
    }
}
