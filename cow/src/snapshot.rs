//! Published snapshots: a folder of parts with a manifest of their digests.
//!
//! ```text
//!  Staging ──publish──► folder in place, complete ──Snapshot::open──► verified parts, held open
//!     │                  (atomic rename)                │
//!     └──drop──► gone                                   └──► SnapshotError: refused, never booted
//! ```
//!
//! A folder in its place is complete, because it is renamed there last. What was altered since is refused: at opening by its digest,
//! later by its size, times and inode.

mod manifest;
mod open;
mod staging;

pub use manifest::{Manifest, Part};
pub use open::{Snapshot, SnapshotError};
pub use staging::{PublishError, Staging, sweep};

/// The manifest's file name.
const MANIFEST: &str = "manifest.json";

/// Whether a part may have this name: one plain, visible path component that is not the manifest's.
fn is_part_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    !name.is_empty() && name.len() <= 100 && !name.starts_with('.') && name != MANIFEST && name.bytes().all(plain)
}

#[cfg(test)]
mod tests;
