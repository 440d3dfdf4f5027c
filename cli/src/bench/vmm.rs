//! `stasis bench vmm`: what the VMM adds to the bare limit, measured with a guest that runs at full speed on any KVM.
//!
//! ```text
//! flat guest ─boot, snapshot─▶ image, state ─▶ limit and claim in turns ─▶ rewinds ─▶ density ─▶ creates
//! ```

mod births;
mod guest;

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use stasis_loadtest::{Histogram, Row, Unit, pss_of_vm};
use stasis_vmm_api::{Reply, Request};

use self::{
    births::{Births, Vmm, from_start, kvm},
    guest::{DONE, RESET},
};

/// Measurements of a claim; of a rewind, per number of pages.
const CLAIMS: usize = 200;
const REWINDS: usize = 40;
const DIRTY_PAGES: [u64; 4] = [10, 100, 1_000, 10_000];
/// Paused VMs at which density is measured.
const DENSITIES: [usize; 3] = [10, 100, 500];
/// Claims beside so many paused VMs.
const CLAIMS_AMONG_OTHERS: usize = 50;
const CREATES: u32 = 200;

/// What to measure, and where the figures go.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct VmmBench {
    /// Add the figures to this report, a JSON list; those of the same names are replaced
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
}

/// Measures all.
///
/// # Errors
/// Where KVM is missing, the user is not root, or a VM failed.
pub(super) fn measure() -> anyhow::Result<Vec<Row>> {
    let births = Births::new()?;
    let snapshot = Snapshot::take(&births)?;
    let mut rows = claims(&births, &snapshot)?;
    rows.extend(rewinds(&births, &snapshot)?);
    rows.extend(density(&births, &snapshot)?);
    rows.push(creates(&births, &snapshot)?);
    Ok(rows)
}

/// A test guest that has not run yet.
struct Snapshot {
    /// In which it ends itself at once.
    image: File,
    state: File,
}

impl Snapshot {
    fn take(births: &Births) -> anyhow::Result<Self> {
        let kernel = tempfile::tempfile()?;
        kernel.write_all_at(&guest::image(), 0)?;
        let mut vmm = births.shell()?;
        vmm.expect(&Request::Boot { cmdline: String::new(), initrd: false }, &[&kernel])?;
        let (image, state) = (tempfile::tempfile()?, tempfile::tempfile()?);
        vmm.expect(&Request::Snapshot, &[&image, &state])?;
        Ok(Self { image: guest::variant(&image, 0, RESET)?, state })
    }

    fn state(&self) -> anyhow::Result<File> {
        from_start(&self.state).context("the state of the test guest")
    }
}

/// The limit and ours in turns, so that whatever else the machine does befalls both.
fn claims(births: &Births, snapshot: &Snapshot) -> anyhow::Result<Vec<Row>> {
    let (mut limit, mut ours) = (Histogram::new(Unit::Micros), Histogram::new(Unit::Micros));
    for _ in 0..CLAIMS {
        limit.record_time(stasis_vmm::limit::claim(kvm()?, &snapshot.image, &snapshot.state()?)?);
        ours.record_time(claim(births, snapshot)?);
    }
    let ratio = ours.quantile(0.5) / limit.quantile(0.5);
    Ok(vec![
        limit.row(
            "limit.claim_us",
            "raw KVM calls in one thread, no device and no process: image mapped, state set, first exit of the test guest",
        ),
        ours.row(
            "claim.test_guest_us",
            format!(
                "a shell in a jailed process, from the request to the message that the test guest has made its first exit; {ratio:.2} times the limit's median"
            ),
        ),
    ])
}

/// One claim of a fresh shell. What is timed is the claim alone.
fn claim(births: &Births, snapshot: &Snapshot) -> anyhow::Result<Duration> {
    let (mut vmm, state) = (births.shell()?, snapshot.state()?);
    let start = Instant::now();
    vmm.restore_and_run(&snapshot.image, &state)?;
    Ok(start.elapsed())
}

fn rewinds(births: &Births, snapshot: &Snapshot) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for pages in DIRTY_PAGES {
        let image = guest::variant(&snapshot.image, pages, 0)?;
        let mut vmm = births.shell()?;
        vmm.expect(&Request::Restore, &[&image, &snapshot.state()?])?;
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
        let note = format!("a running test guest that has written {pages} pages, from the request to its answer");
        rows.push(times.row(format!("rewind_us.{pages}"), note));
    }
    Ok(rows)
}

/// Memory of paused VMs, and claims beside them.
fn density(births: &Births, snapshot: &Snapshot) -> anyhow::Result<Vec<Row>> {
    let (mut paused, mut rows): (Vec<Vmm>, _) = (Vec::new(), Vec::new());
    for count in DENSITIES {
        while paused.len() < count {
            let mut vmm = births.shell()?;
            vmm.expect(&Request::Restore, &[&snapshot.image, &snapshot.state()?])?;
            paused.push(vmm);
        }
        let mut pss = Histogram::new(Unit::Mebibytes);
        for vmm in &paused {
            #[allow(clippy::cast_precision_loss, reason = "no VM has 2^53 bytes")]
            pss.record(pss_of_vm(vmm.pid())? as f64 / f64::from(1 << 20));
        }
        rows.push(
            pss.row(
                format!("density.pss_mib.{count}"),
                format!("PSS of each of {count} paused test guests' processes"),
            ),
        );
        let mut claims = Histogram::new(Unit::Micros);
        for _ in 0..CLAIMS_AMONG_OTHERS {
            claims.record_time(claim(births, snapshot)?);
        }
        rows.push(claims.row(format!("density.claim_us.{count}"), format!("claims beside {count} paused VMs")));
    }
    Ok(rows)
}

/// Whole lives, one after the other: birth, shell, claim, end.
fn creates(births: &Births, snapshot: &Snapshot) -> anyhow::Result<Row> {
    let mut per_second = Histogram::new(Unit::PerSecond);
    let before = cpu_time()?;
    for _ in 0..CREATES {
        claim(births, snapshot)?;
    }
    let spent = cpu_time()?.saturating_sub(before);
    per_second.record(f64::from(CREATES) / spent.as_secs_f64());
    Ok(per_second.row(
        "creates_per_core_second",
        format!("{CREATES} test guests from birth to end, over the processor time that they and this took"),
    ))
}

/// Processor time of this process and of those of its children that have ended.
fn cpu_time() -> anyhow::Result<Duration> {
    use nix::sys::resource::{UsageWho, getrusage};
    let mut sum = Duration::ZERO;
    for who in [UsageWho::RUSAGE_SELF, UsageWho::RUSAGE_CHILDREN] {
        let usage = getrusage(who)?;
        for time in [usage.user_time(), usage.system_time()] {
            sum += Duration::from_secs(time.tv_sec().try_into()?) + Duration::from_micros(time.tv_usec().try_into()?);
        }
    }
    Ok(sum)
}
