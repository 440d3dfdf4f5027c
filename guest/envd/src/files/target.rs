//! Which file, as whom.

use std::{path::PathBuf, time::SystemTime};

use http::{HeaderMap, StatusCode, Uri};
use percent_encoding::percent_decode;

use crate::{
    answer::Refusal,
    envd::Envd,
    files::sign::{self, Operation},
    paths,
    users::User,
};

/// What the address asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Query {
    pub(super) path: Option<String>,
    pub(super) username: Option<String>,
    pub(super) signature: Option<String>,
    /// Seconds since 1970.
    pub(super) expiration: Option<i64>,
}

impl Query {
    /// Of an address. What else it names is passed over.
    pub(super) fn of(uri: &Uri) -> Result<Self, Refusal> {
        let bad = |message: String| Refusal::new(StatusCode::BAD_REQUEST, message);
        let mut query = Self::default();
        for pair in uri.query().unwrap_or_default().split('&') {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let place = match name {
                "path" => &mut query.path,
                "username" => &mut query.username,
                "signature" => &mut query.signature,
                "signature_expiration" => {
                    let end =
                        value.parse().map_err(|_| bad("invalid signature_expiration: expected a number".into()))?;
                    query.expiration = Some(end);
                    continue;
                }
                _ => continue,
            };
            let text = value.replace('+', " ");
            let text =
                percent_decode(text.as_bytes()).decode_utf8().map_err(|_| bad(format!("invalid {name}: not UTF-8")))?;
            *place = Some(text.into_owned());
        }
        Ok(query)
    }
}

/// Whom a request is for.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    pub(super) user: User,
    workdir: Option<PathBuf>,
}

impl Caller {
    /// The named user, or the default one.
    pub(super) fn named(envd: &Envd, name: Option<&str>) -> Result<Self, Refusal> {
        let unknown = |name| format!("error looking up user '{name}': user: unknown user {name}");
        let name = name.filter(|name| !name.is_empty());
        let user = envd.user(name).map_err(|name| Refusal::new(StatusCode::UNAUTHORIZED, unknown(name)))?;
        Ok(Self { user, workdir: envd.workdir() })
    }

    pub(super) fn path(&self, path: &str) -> Result<PathBuf, Refusal> {
        paths::resolve(path, &self.user, self.workdir.as_deref())
            .map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, format!("error resolving path: {error}")))
    }
}

/// Who asks for `operation`, once that is allowed.
pub(super) fn allowed(
    envd: &Envd,
    headers: &HeaderMap,
    uri: &Uri,
    operation: Operation,
) -> Result<(Query, Caller), Refusal> {
    let query = Query::of(uri)?;
    let token = envd.settings().token.clone();
    sign::check(token.as_ref(), headers, &query, operation, SystemTime::now())?;
    let caller = Caller::named(envd, query.username.as_deref())?;
    Ok((query, caller))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded_or_refused() {
        let query = Query::of(
            &"/files?path=%2Ftmp%2Fa+b%2B.txt&x=%ff&username=root&signature=v1_a%2Fb&signature_expiration=7"
                .parse()
                .unwrap(),
        );
        let wanted = Query {
            path: Some("/tmp/a b+.txt".into()),
            username: Some("root".into()),
            signature: Some("v1_a/b".into()),
            expiration: Some(7),
        };
        assert_eq!(query, Ok(wanted));
        assert_eq!(Query::of(&"/files".parse().unwrap()), Ok(Query::default()));
        for (uri, message) in [
            ("/files?path=%ff", "invalid path: not UTF-8"),
            ("/files?signature_expiration=soon", "invalid signature_expiration: expected a number"),
        ] {
            assert_eq!(Query::of(&uri.parse().unwrap()).unwrap_err().message, message);
        }
    }
}
