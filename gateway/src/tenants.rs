//! Who calls: tenants, known by their keys.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
};

use http::{HeaderMap, HeaderName};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use stasis_pool_api::Tenant;

use crate::error::ApiError;

/// The header that carries a key: E2B's.
pub(crate) const KEY: HeaderName = HeaderName::from_static("x-api-key");
/// Bytes of a key. The least is what 16 random bytes take in hexadecimal.
const LENGTH: std::ops::RangeInclusive<usize> = 32..=256;

/// Why a file of tenants is refused. Keys are in no message.
#[derive(Debug, thiserror::Error)]
pub enum TenantsError {
    /// Not TOML, or a field that is unknown, missing or of the wrong type.
    #[error("line {line}: {reason}; a tenant is [[tenant]] with name = \"…\" and key = \"…\"")]
    Toml {
        /// Where.
        line: usize,
        /// What.
        reason: String,
    },
    /// A key that could be guessed, or that no header can carry.
    #[error(
        "the key of tenant {0} is not {least} to {most} visible ASCII characters: `openssl rand -hex 32` makes one",
        least = LENGTH.start(), most = LENGTH.end()
    )]
    Key(Tenant),
    /// A name or a key that two tenants have.
    #[error("tenant {0} has the name or the key of another: each must have its own")]
    Twice(Tenant),
    /// Nobody could call.
    #[error("no tenant is named: add one, or leave the file out")]
    Nobody,
}

/// Who may call, and as whom.
#[derive(Clone, Default)]
pub struct Tenants(Option<Arc<HashMap<[u8; 32], Tenant>>>);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    tenant: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: Tenant,
    key: String,
}

impl Tenants {
    /// Those of a file: TOML, a `[[tenant]]` with `name` and `key` for each.
    ///
    /// # Errors
    /// [`TenantsError`].
    pub fn parse(text: &str) -> Result<Self, TenantsError> {
        let File { tenant: entries } = toml::from_str(text).map_err(|error| {
            // Not the error's own text, which quotes the line, and with it a key.
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            TenantsError::Toml { line: 1 + before.matches('\n').count(), reason: error.message().to_owned() }
        })?;
        let (mut keys, mut names) = (HashMap::new(), HashSet::new());
        for Entry { name, key } in entries {
            if !LENGTH.contains(&key.len()) || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                return Err(TenantsError::Key(name));
            }
            if !names.insert(name.clone()) || keys.insert(hash(key.as_bytes()), name.clone()).is_some() {
                return Err(TenantsError::Twice(name));
            }
        }
        if keys.is_empty() { Err(TenantsError::Nobody) } else { Ok(Self(Some(Arc::new(keys)))) }
    }

    /// Everybody is the default tenant, and needs no key.
    #[must_use]
    pub const fn is_everybody(&self) -> bool {
        self.0.is_none()
    }

    /// Whether it names this one.
    #[must_use]
    pub fn names(&self, tenant: &Tenant) -> bool {
        self.0.as_ref().is_some_and(|keys| keys.values().any(|named| named == tenant))
    }

    /// Whose request it is. Where keys are needed, the key is taken out: it is nobody else's business.
    pub(crate) fn admit(&self, headers: &mut HeaderMap) -> Result<Tenant, ApiError> {
        let Some(keys) = &self.0 else { return Ok(Tenant::default()) };
        let mut given = headers.get_all(&KEY).iter();
        // Found by its hash: how long that takes tells nothing of the keys that there are.
        let tenant = match (given.next(), given.next()) {
            (Some(key), None) => keys.get(&hash(key.as_bytes())).cloned(),
            _ => None,
        };
        headers.remove(&KEY);
        tenant.ok_or(ApiError::Key)
    }
}

impl fmt::Debug for Tenants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(keys) => f.debug_set().entries(keys.values()).finish(),
            None => f.write_str("everybody"),
        }
    }
}

fn hash(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

    #[test]
    fn a_key_is_a_tenant_and_goes_no_further() {
        let tenants =
            Tenants::parse(&format!("[[tenant]]\nname='a'\nkey='{A}'\n[[tenant]]\nname='b'\nkey='{B}'")).unwrap();
        let admit = |keys: &[&str]| {
            let mut headers = HeaderMap::new();
            for key in keys {
                headers.append(KEY, HeaderValue::from_str(key).unwrap());
            }
            let tenant = tenants.admit(&mut headers).ok();
            assert!(!headers.contains_key(KEY));
            tenant.map(|tenant| tenant.to_string())
        };
        assert_eq!((admit(&[A]).as_deref(), admit(&[B]).as_deref()), (Some("a"), Some("b")));
        for wrong in [&[][..], &["c"], &[&A[1..]], &[A, B], &[&A.to_uppercase()]] {
            assert_eq!(admit(wrong), None, "{wrong:?}");
        }
        assert!(tenants.names(&"b".parse().unwrap()) && !tenants.names(&Tenant::default()));
        assert!(!format!("{tenants:?}").contains(A));
    }

    #[test]
    fn without_a_file_everybody_is_the_default_tenant_and_the_header_is_the_function_s() {
        let mut headers = HeaderMap::from_iter([(KEY, HeaderValue::from_static("its own"))]);
        assert_eq!(Tenants::default().admit(&mut headers).unwrap().as_str(), "default");
        assert!(headers.contains_key(KEY));
    }

    #[test]
    fn a_bad_file_is_refused_in_a_line_without_a_key() {
        let cases = [
            (String::new(), "no tenant is named"),
            (format!("[[tenant]]\nname='a'\nkey='{A}'\nquota=1"), "line 4: unknown field `quota`"),
            (format!("[[tenant]]\nname='a b'\nkey='{A}'"), "line 2: \"a b\" is not 1 to 63 letters"),
            (format!("[[tenant]]\nname='a'\nkey='{A}"), "line 3"),
            ("[[tenant]]\nname='a'".into(), "missing field `key`"),
            ("[[tenant]]\nname='a'\nkey='short'".into(), "the key of tenant a is not 32 to 256"),
            (format!("[[tenant]]\nname='a'\nkey='{A} '"), "visible ASCII"),
            (
                format!("[[tenant]]\nname='a'\nkey='{A}'\n[[tenant]]\nname='b'\nkey='{A}'"),
                "tenant b has the name or the key",
            ),
            (
                format!("[[tenant]]\nname='a'\nkey='{A}'\n[[tenant]]\nname='a'\nkey='{B}'"),
                "tenant a has the name or the key",
            ),
        ];
        for (text, wanted) in cases {
            let refused = Tenants::parse(&text).unwrap_err().to_string();
            assert!(refused.contains(wanted), "{refused:?} lacks {wanted:?}");
            assert!(!refused.contains(A) && !refused.contains("short"), "{refused}");
        }
    }
}
