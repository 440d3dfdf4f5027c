//! The gateway's URL.

use std::{fmt, str::FromStr};

use http::Uri;

/// `http://HOST[:PORT]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiUrl {
    host: String,
    port: u16,
    authority: String,
    key: Option<ApiKey>,
}

/// A tenant's key.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct ApiKey(String);

impl FromStr for ApiKey {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

/// Why a URL is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ApiUrlError {
    /// Not a URL.
    Invalid,
    /// TLS, or something else that this client does not speak.
    Scheme(String),
    /// A path, a query or a user, which would be ignored.
    More,
}

impl fmt::Display for ApiUrlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid => f.write_str("write it as http://HOST:PORT"),
            Self::Scheme(scheme) => {
                write!(f, "{scheme} is not spoken here, only plain http: write it as http://HOST:PORT")
            }
            Self::More => f.write_str("it must end after host and port: http://HOST:PORT"),
        }
    }
}

impl std::error::Error for ApiUrlError {}

impl ApiUrl {
    /// Host and port, for a connection.
    pub(super) fn address(&self) -> (&str, u16) {
        (&self.host, self.port)
    }

    /// With the key to send there.
    pub(super) fn with(self, key: Option<ApiKey>) -> Self {
        Self { key, ..self }
    }

    pub(super) fn key(&self) -> Option<&str> {
        self.key.as_ref().map(|key| key.0.as_str())
    }

    /// For the `Host` header.
    pub(super) fn authority(&self) -> &str {
        &self.authority
    }
}

impl fmt::Display for ApiUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}", self.authority)
    }
}

impl FromStr for ApiUrl {
    type Err = ApiUrlError;

    fn from_str(text: &str) -> Result<Self, ApiUrlError> {
        let uri: Uri = text.parse().map_err(|_| ApiUrlError::Invalid)?;
        let scheme = uri.scheme_str().ok_or(ApiUrlError::Invalid)?;
        if scheme != "http" {
            return Err(ApiUrlError::Scheme(scheme.to_owned()));
        }
        let authority = uri.authority().ok_or(ApiUrlError::Invalid)?;
        if uri.query().is_some() || !matches!(uri.path(), "" | "/") || authority.as_str().contains('@') {
            return Err(ApiUrlError::More);
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(ApiUrlError::Invalid);
        }
        Ok(Self {
            host: host.to_owned(),
            port: authority.port_u16().unwrap_or(80),
            authority: authority.as_str().to_owned(),
            key: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_http_to_a_host_and_port() {
        let parse = str::parse::<ApiUrl>;
        assert_eq!(parse("http://127.0.0.1:3000").unwrap().address(), ("127.0.0.1", 3000));
        assert_eq!(parse("http://[::1]:80/").unwrap().address(), ("::1", 80));
        assert_eq!(parse("http://node").unwrap().address(), ("node", 80));
        assert_eq!(parse("https://node"), Err(ApiUrlError::Scheme("https".into())));
        for more in ["http://node/api", "http://node/?a", "http://me:secret@node"] {
            assert_eq!(parse(more), Err(ApiUrlError::More), "{more}");
        }
        for invalid in ["", "node", "node:3000", "/v1", "http://"] {
            assert!(parse(invalid).is_err(), "{invalid}");
        }
    }
}
