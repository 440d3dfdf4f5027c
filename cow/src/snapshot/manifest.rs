//! What a snapshot says of itself.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::Digest;

use super::{SnapshotError, is_part_name};

/// The only format that this version writes and reads.
pub(super) const FORMAT: u32 = 1;

/// A snapshot's parts, and what its owner wants to know of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of this structure.
    pub format: u32,
    /// When the snapshot was taken, seconds since the Unix epoch.
    pub created_at: u64,
    /// The owner's: which kernel, which agent, which inputs.
    pub details: serde_json::Value,
    /// The files, by name.
    pub parts: BTreeMap<String, Part>,
}

/// One file of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Its length.
    pub bytes: u64,
    /// Its content.
    pub digest: Digest,
}

/// The file: the manifest's bytes and their digest. It has exactly one spelling.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope<'a> {
    #[serde(borrow)]
    manifest: &'a RawValue,
    sha256: Digest,
}

/// The one field that every format has.
#[derive(Deserialize)]
struct Format {
    format: u32,
}

impl Manifest {
    /// The manifest file's content, and the manifest's digest.
    pub(super) fn seal(&self) -> serde_json::Result<(String, Digest)> {
        let manifest = serde_json::to_string(self)?;
        let digest = Digest::of(manifest.as_bytes());
        Ok((envelope(&manifest, digest), digest))
    }

    /// Reads a manifest file's content back, if not one byte of it differs.
    pub(super) fn unseal(file: &[u8]) -> Result<(Self, Digest), SnapshotError> {
        let invalid = |reason: String| SnapshotError::Manifest { reason };
        let text = str::from_utf8(file).map_err(|error| invalid(error.to_string()))?;
        let sealed: Envelope<'_> = serde_json::from_str(text).map_err(|error| invalid(error.to_string()))?;
        let manifest = sealed.manifest.get();
        let found = Digest::of(manifest.as_bytes());
        if found != sealed.sha256 {
            return Err(invalid(format!("its digest is {found}, but it says {}", sealed.sha256)));
        }
        if envelope(manifest, found) != text {
            return Err(invalid("it is not as it was written".into()));
        }
        let Format { format } = serde_json::from_str(manifest).map_err(|error| invalid(error.to_string()))?;
        if format != FORMAT {
            return Err(SnapshotError::Version { found: format, supported: FORMAT });
        }
        let manifest: Self = serde_json::from_str(manifest).map_err(|error| invalid(error.to_string()))?;
        match manifest.parts.keys().find(|name| !is_part_name(name)) {
            Some(name) => Err(invalid(format!("{name:?} is no part's name"))),
            None => Ok((manifest, found)),
        }
    }
}

fn envelope(manifest: &str, digest: Digest) -> String {
    format!("{{\"manifest\":{manifest},\"sha256\":\"{digest}\"}}")
}
