//! Which template or sandbox, and which path of its function.

use http::Uri;

use super::{PREFIX, SANDBOX_PREFIX};

/// `/invoke/{template}{path}?{query}` or `/sandbox/{id}{path}?{query}`, taken apart and otherwise as the caller wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// The template's or the sandbox's.
    pub(crate) name: String,
    /// It is a sandbox's.
    pub(crate) is_sandbox: bool,
    /// Path and query for the function.
    pub(crate) path_and_query: String,
}

impl Target {
    pub(crate) fn of(uri: &Uri) -> Self {
        let sandbox = uri.path().strip_prefix(SANDBOX_PREFIX);
        let rest = sandbox.or_else(|| uri.path().strip_prefix(PREFIX)).unwrap_or_default();
        let (name, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let path = if path.is_empty() { "/" } else { path };
        let path_and_query = uri.query().map_or_else(|| path.to_owned(), |query| format!("{path}?{query}"));
        Self { name: name.to_owned(), is_sandbox: sandbox.is_some(), path_and_query }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_of_the_path_is_kept_to_the_byte() {
        for (uri, template, path) in [
            ("/invoke/x", "x", "/"),
            ("/invoke/x/", "x", "/"),
            ("/invoke/x?a=1&b=%20", "x", "/?a=1&b=%20"),
            ("/invoke/x?", "x", "/?"),
            ("/invoke/x//a/../b%2Fc;d", "x", "//a/../b%2Fc;d"),
            ("/invoke/x/%e4%F6?q=/invoke/y", "x", "/%e4%F6?q=/invoke/y"),
            ("http://host:80/invoke/x/a", "x", "/a"),
            ("/invoke//a", "", "/a"),
            ("/invoke/x%2fy/z", "x%2fy", "/z"),
        ] {
            let target = Target::of(&uri.parse().unwrap());
            assert_eq!((target.name.as_str(), target.path_and_query.as_str()), (template, path), "{uri}");
            assert!(!target.is_sandbox);
        }
        let target = Target::of(&"/sandbox/sb-1/a?b".parse().unwrap());
        assert_eq!((target.name.as_str(), target.path_and_query.as_str()), ("sb-1", "/a?b"));
        assert!(target.is_sandbox);
    }
}
