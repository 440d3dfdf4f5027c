//! Paths as callers write them.

use std::path::{Component, Path, PathBuf};

use crate::users::User;

/// Why a path cannot be one.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PathError {
    /// `~name` is not supported.
    #[error("failed to expand path '{0}' for user '{1}': cannot expand user-specific home dir")]
    Tilde(String, String),
    /// It cannot be the name of a file.
    #[error("the path contains a zero byte")]
    Zero,
}

/// The absolute path that is meant: none is `workdir`, or else the home; `~` is the home; what is relative begins there, with its `..` taken
/// out; what is absolute stays as it is.
pub(crate) fn resolve(path: &str, user: &User, workdir: Option<&Path>) -> Result<PathBuf, PathError> {
    if path.contains('\0') {
        return Err(PathError::Zero);
    }
    if path.is_empty() {
        return Ok(workdir.map_or_else(|| user.home.clone(), |workdir| clean(&user.home.join(workdir))));
    }
    match path.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => {
            Ok(clean(&user.home.join(rest.trim_start_matches('/'))))
        }
        Some(_) => Err(PathError::Tilde(path.into(), user.name.clone())),
        None if path.starts_with('/') => Ok(path.into()),
        None => Ok(clean(&user.home.join(path))),
    }
}

/// Without `.` and `..`, as the text alone says: links are not followed.
pub(crate) fn clean(path: &Path) -> PathBuf {
    let mut cleaned = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => cleaned.push(name),
            Component::ParentDir => drop(cleaned.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    cleaned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_resolved_as_the_sdks_expect() {
        let user = User { name: "user".into(), uid: 1, gid: 1, groups: vec![], home: "/home/user".into() };
        for (path, workdir, wanted) in [
            ("", None, "/home/user"),
            ("", Some("/app"), "/app"),
            ("", Some("work"), "/home/user/work"),
            ("a.txt", None, "/home/user/a.txt"),
            ("a.txt", Some("/app"), "/home/user/a.txt"),
            ("./a/../b", None, "/home/user/b"),
            ("../../../etc/passwd", None, "/etc/passwd"),
            ("../../../../../..", None, "/"),
            ("~", None, "/home/user"),
            ("~/a", None, "/home/user/a"),
            ("~/../x", None, "/home/x"),
            ("/a/../b/", None, "/a/../b/"),
        ] {
            assert_eq!(
                resolve(path, &user, workdir.map(Path::new)).unwrap(),
                Path::new(wanted),
                "{path} in {workdir:?}"
            );
        }
        assert_eq!(resolve("~root/a", &user, None), Err(PathError::Tilde("~root/a".into(), "user".into())));
        assert_eq!(resolve("a\0b", &user, None), Err(PathError::Zero));
    }
}
