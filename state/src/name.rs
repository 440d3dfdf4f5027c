//! Names that are safe in a path, a URL, a log line and a metric label.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A name that is not one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not 1 to 63 letters, digits, dots, hyphens and underscores that begin with a letter or digit")]
pub struct NameError(String);

fn check(name: &str) -> Result<(), NameError> {
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    let valid =
        name.len() <= 63 && name.bytes().all(inner) && name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    if valid { Ok(()) } else { Err(NameError(name.chars().take(80).collect())) }
}

macro_rules! name {
    ($(#[$doc:meta])* $type:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type(String);

        impl $type {
            /// The name.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $type {
            type Err = NameError;

            fn from_str(name: &str) -> Result<Self, NameError> {
                check(name).map(|()| Self(name.to_owned()))
            }
        }

        impl TryFrom<String> for $type {
            type Error = NameError;

            fn try_from(name: String) -> Result<Self, NameError> {
                check(&name).map(|()| Self(name))
            }
        }

        impl From<$type> for String {
            fn from(name: $type) -> Self {
                name.0
            }
        }
    };
}

name! {
    /// What a sandbox is called, unique in a store.
    SandboxId
}
name! {
    /// Whose sandbox it is.
    Tenant
}

impl Default for Tenant {
    /// The one that everybody is where no tenants are told apart.
    fn default() -> Self {
        Self("default".to_owned())
    }
}

name! {
    /// A node.
    NodeId
}
name! {
    /// Any other name: of a template, its version, a hold, a file below the node's data directory.
    Name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_everywhere() {
        for good in ["a", "sb-1", "A_b.c", &"a".repeat(63)] {
            assert!(good.parse::<SandboxId>().is_ok(), "{good}");
        }
        for bad in ["", "..", "-a", ".a", "a/b", "a b", "ä", "a\0", "a'b", &"a".repeat(64)] {
            assert!(bad.parse::<SandboxId>().is_err(), "{bad}");
            assert!(serde_json::from_value::<SandboxId>(bad.into()).is_err(), "{bad}");
        }
    }
}
