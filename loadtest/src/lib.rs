//! Measurements of a running Stasis, and the report they end in.
//!
//! [`closed_loop()`] drives, [`ServerTiming`] tells where the time went, [`Histogram`] gathers, [`Row`] is a figure with its spread,
//! [`merge_into`] keeps it. What is measured, and over which protocol, is the caller's: this crate speaks no HTTP and knows no
//! template.

#![forbid(unsafe_code)]

mod closed_loop;
mod histogram;
mod host;
mod report;
mod row;
mod server_timing;

pub use closed_loop::{Finished, closed_loop, per_second};
pub use histogram::{Histogram, Unit};
pub use host::{GuestKernel, PssError, pss_of_vm};
pub use report::{ReportError, load, merge_into};
pub use row::{Row, table};
pub use server_timing::ServerTiming;
