//! What an operator may set.

use std::time::Duration;

use crate::tenants::Tenants;

/// The gateway's limits, and who may call.
#[derive(Debug, Clone)]
pub struct Config {
    /// Most bytes of an invocation's body.
    pub max_body: u64,
    /// Most bytes of a template's archive.
    pub max_archive: u64,
    /// How long an invocation may wait for a VM.
    pub claim_budget: Duration,
    /// How long requests may still run once the gateway is told to stop.
    pub drain: Duration,
    /// Who may call.
    pub tenants: Tenants,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            max_body: 64 << 20,
            max_archive: 512 << 20,
            claim_budget: Duration::from_secs(10),
            drain: Duration::from_secs(10),
            tenants: Tenants::default(),
        }
    }
}
