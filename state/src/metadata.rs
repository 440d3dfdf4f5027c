//! What a caller notes on a sandbox.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Most bytes of all keys and values together: a record stays small enough to be read and written as one.
const MOST_BYTES: usize = 16 << 10;
/// Most keys.
const MOST_KEYS: usize = 64;

/// Why metadata is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MetadataError {
    /// Too many keys.
    #[error("metadata has {0} keys, and may have {MOST_KEYS}: leave some out")]
    Keys(usize),
    /// Too long in all.
    #[error("metadata has {0} bytes, and may have {MOST_BYTES}: keep what is large in the sandbox, and its name here")]
    Bytes(usize),
}

/// Strings by name, at most 64 and 16 KiB in all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, String>", into = "BTreeMap<String, String>")]
pub struct Metadata(BTreeMap<String, String>);

impl Metadata {
    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// All of it, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }
}

impl TryFrom<BTreeMap<String, String>> for Metadata {
    type Error = MetadataError;

    fn try_from(map: BTreeMap<String, String>) -> Result<Self, MetadataError> {
        if map.len() > MOST_KEYS {
            return Err(MetadataError::Keys(map.len()));
        }
        let bytes = map.iter().map(|(key, value)| key.len() + value.len()).sum();
        if bytes > MOST_BYTES { Err(MetadataError::Bytes(bytes)) } else { Ok(Self(map)) }
    }
}

impl From<Metadata> for BTreeMap<String, String> {
    fn from(metadata: Metadata) -> Self {
        metadata.0
    }
}
