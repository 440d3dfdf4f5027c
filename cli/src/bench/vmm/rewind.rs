//! A used VM made new again.

use std::time::Instant;

use anyhow::bail;
use stasis_loadtest::{Histogram, Row, Unit};
use stasis_vmm_api::{Reply, Request};

use super::{
    Bench,
    figure::against,
    guest::{DONE, Guest},
};

const REWINDS: usize = 40;
pub(super) const DIRTY_PAGES: [u64; 4] = [10, 100, 1_000, 10_000];
/// What a written page may add to a rewind, in us.
const PER_PAGE_US: f64 = 6.0;

pub(super) fn name(pages: u64) -> String {
    format!("rewind_us.{pages}")
}

pub(super) fn rewinds(bench: &Bench, pages: u64) -> anyhow::Result<Row> {
    let mut vmm = bench.restored(Guest { pages, ..Guest::default() })?;
    let mut times = Histogram::new(Unit::Micros);
    for _ in 0..REWINDS {
        vmm.expect(&Request::Resume, &[])?;
        vmm.console_has(DONE)?;
        let start = Instant::now();
        let reply = vmm.expect(&Request::Rewind, &[])?;
        times.record_time(start.elapsed());
        let Reply::Rewound(report) = reply else { bail!("a rewind was answered by {reply:?}") };
        if report.dirty_bytes < pages * 4096 {
            bail!("the test guest wrote {pages} pages, the rewind found {} bytes", report.dirty_bytes);
        }
    }
    #[allow(clippy::cast_precision_loss, reason = "a few thousand")]
    let most = bench.claim_us()? + PER_PAGE_US * pages as f64;
    let target = against(times.quantile(0.5), most, "this run's claim and 6 us for each page");
    let note = format!("a running test guest that has written {pages} pages, from the request to its answer; {target}");
    Ok(times.row(name(pages), note))
}
