//! The HTTP front door of Stasis: invocations and the node's API.
//!
//! Knows HTTP, templates' names and the [`Node`](stasis_pool_api::Node) interface. Knows no KVM, no file and no BPF map.
//!
//! ```text
//! server ── connections ──▶ front ──┬─ /invoke/… ─▶ invoke ──▶ claim, forward, stream back
//!                                   └─ the rest ──▶ routes ──▶ templates, pools, health, metrics
//! ```

#![forbid(unsafe_code)]

mod commands;
mod config;
mod error;
mod events;
mod front;
mod invoke;
mod metrics;
mod request_id;
mod routes;
mod server;
mod tenants;
mod upload;

pub use config::Config;
pub use metrics::install_recorder;
pub use metrics_exporter_prometheus::{BuildError, PrometheusHandle};
pub use server::serve;
pub use tenants::{Tenants, TenantsError};
