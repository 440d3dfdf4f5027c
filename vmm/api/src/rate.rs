//! How much a device may move.

use std::num::NonZeroU64;

use serde::{Deserialize, Serialize};

/// A device's limits. It is left alone for a while when either is used up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RateLimit {
    /// Bytes moved.
    #[serde(default)]
    pub bytes: Option<TokenBucket>,
    /// Requests of a disk, or packets.
    #[serde(default)]
    pub operations: Option<TokenBucket>,
}

/// A bucket that fills at a steady rate up to its size. What is larger than the bucket goes through when there is something in it, and
/// is paid off before the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenBucket {
    /// What flows in.
    pub per_second: NonZeroU64,
    /// What it holds, and holds at the start.
    pub burst: NonZeroU64,
}
