//! What a template is called, and what is known of a built one.

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{TemplateSpec, spec::SpecError};

/// The name of a template: 1 to 63 lower-case letters, digits and inner hyphens, so that it is safe in a path, a URL, a host name
/// and a metric label.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TemplateName(String);

impl TemplateName {
    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TemplateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for TemplateName {
    type Err = SpecError;

    fn from_str(name: &str) -> Result<Self, SpecError> {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let valid =
            (1..=63).contains(&name.len()) && name.chars().all(inner) && !name.starts_with('-') && !name.ends_with('-');
        if valid { Ok(Self(name.to_owned())) } else { Err(SpecError::Name(name.chars().take(80).collect())) }
    }
}

impl TryFrom<String> for TemplateName {
    type Error = SpecError;

    fn try_from(name: String) -> Result<Self, SpecError> {
        name.parse()
    }
}

impl From<TemplateName> for String {
    fn from(name: TemplateName) -> Self {
        name.0
    }
}

/// A built template, as the API shows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TemplateInfo {
    /// Its specification, defaults filled in.
    #[serde(flatten)]
    pub spec: TemplateSpec,
    /// Hash of everything that it was built from; two builds of the same inputs have the same.
    pub digest: String,
    /// When its snapshot was taken, seconds since the Unix epoch.
    pub created_at: u64,
    /// The guest kernel's boot id inside the snapshot.
    pub kernel_boot_id: String,
    /// From the start of the build to its publication.
    pub build_ms: u64,
    /// Median of a few requests to the readiness path made inside the guest: the guest's own share of an answer, microseconds.
    pub null_request_us: u64,
    /// Bytes of guest memory in the snapshot that are not zero.
    pub memory_bytes: u64,
    /// What it was made with.
    pub made_with: MadeWith,
}

/// The versions behind a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeWith {
    /// Stasis itself.
    pub stasis: String,
    /// The agent inside.
    pub agent: String,
    /// The guest kernel's release (`uname -r`).
    pub guest_kernel: String,
}

impl TemplateInfo {
    /// The guest's own share of an answer.
    #[must_use]
    pub fn null_request(&self) -> Duration {
        Duration::from_micros(self.null_request_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_everywhere() {
        for good in ["a", "wordcount", "hello-node", "x9", &"a".repeat(63)] {
            assert!(good.parse::<TemplateName>().is_ok(), "{good}");
        }
        for bad in ["", "-a", "a-", "A", "a.b", "a/b", "..", "ä", "a b", &"a".repeat(64)] {
            assert!(bad.parse::<TemplateName>().is_err(), "{bad}");
        }
    }
}
