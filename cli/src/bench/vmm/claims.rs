//! Claims: beside the bare limit, beside many paused VMs, and as parts of whole lives.

use std::time::{Duration, Instant};

use stasis_loadtest::{Histogram, Row, Unit, pss_of_vm};
use stasis_vmm_api::Request;

use super::{
    Bench,
    births::{Vmm, kvm},
    figure::against,
};

/// Measurements of a claim, and where only its median is needed.
const CLAIMS: usize = 200;
const CLAIMS_FOR_A_MEDIAN: usize = 50;
/// Paused VMs at which density is measured.
pub(super) const DENSITIES: [usize; 3] = [10, 100, 500];
const LIVES: u32 = 200;

pub(super) const LIMIT: &str = "limit.claim_us";
pub(super) const OURS: &str = "claim.test_guest_us";
pub(super) const CREATES: &str = "creates_per_core_second";

/// How often the limit a claim may take.
const TIMES_THE_LIMIT: f64 = 2.0;
/// MiB of memory of a paused VM among 100.
const PSS_MIB: f64 = 1.0;
/// How much longer a claim may take beside the most paused VMs than beside the fewest.
const AMONG_OTHERS: f64 = 1.3;
/// Lives per second of processor time.
const LIVES_PER_SECOND: f64 = 200.0;

pub(super) fn density_names(count: usize) -> [String; 2] {
    [format!("density.pss_mib.{count}"), format!("density.claim_us.{count}")]
}

/// The limit and ours in turns, so that whatever else the machine does befalls both.
pub(super) fn claims(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let (mut limit, mut ours) = (Histogram::new(Unit::Micros), Histogram::new(Unit::Micros));
    for _ in 0..CLAIMS {
        limit.record_time(bench.limit()?);
        ours.record_time(bench.claim()?);
    }
    let median = ours.quantile(0.5);
    // Whoever measured it before had fewer.
    let _ = bench.claim_us.set(median);
    let target = against(median, limit.quantile(0.5) * TIMES_THE_LIMIT, "twice the limit's median");
    Ok(vec![
        limit.row(
            LIMIT,
            "raw KVM calls in one thread, no device and no process: image mapped, state set, first exit of the test guest",
        ),
        ours.row(
            OURS,
            format!(
                "a shell in a jailed process, prepared for its snapshot, from the request to the message that the test guest has made its first exit; \
                 {target}"
            ),
        ),
    ])
}

impl Bench {
    /// What the kernel alone takes.
    pub(super) fn limit(&self) -> anyhow::Result<Duration> {
        Ok(stasis_vmm::limit::claim(kvm()?, &self.snapshot.image, &self.snapshot.state()?)?)
    }

    /// One claim of a fresh shell. What is timed is the claim alone.
    fn claim(&self) -> anyhow::Result<Duration> {
        let mut vmm = self.snapshot.shell(&self.births)?;
        let start = Instant::now();
        vmm.restore_and_run(&[&self.snapshot.image])?;
        Ok(start.elapsed())
    }

    fn some_claims(&self) -> anyhow::Result<Histogram> {
        let mut times = Histogram::new(Unit::Micros);
        for _ in 0..CLAIMS_FOR_A_MEDIAN {
            times.record_time(self.claim()?);
        }
        Ok(times)
    }

    /// The median of this run's claims, in us.
    pub(super) fn claim_us(&self) -> anyhow::Result<f64> {
        if let Some(known) = self.claim_us.get() {
            return Ok(*known);
        }
        let median = self.some_claims()?.quantile(0.5);
        Ok(*self.claim_us.get_or_init(|| median))
    }
}

/// Memory of paused VMs, and claims beside them.
pub(super) fn density(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let (mut paused, mut rows): (Vec<Vmm>, _) = (Vec::new(), Vec::new());
    let mut fewest = None;
    for count in DENSITIES {
        while paused.len() < count {
            let mut vmm = bench.snapshot.shell(&bench.births)?;
            vmm.expect(&Request::Restore, &[&bench.snapshot.image])?;
            paused.push(vmm);
        }
        let mut pss = Histogram::new(Unit::Mebibytes);
        for vmm in &paused {
            #[allow(clippy::cast_precision_loss, reason = "no VM has 2^53 bytes")]
            pss.record(pss_of_vm(vmm.pid())? as f64 / f64::from(1 << 20));
        }
        let claims = bench.some_claims()?;
        let median = claims.quantile(0.5);
        let fewest = *fewest.get_or_insert(median);
        let [pss_name, claim_name] = density_names(count);
        let target = against(pss.quantile(0.5), PSS_MIB, "at 100 VMs");
        let note =
            format!("PSS of each of {count} paused test guests' processes, which have written nothing; {target}");
        rows.push(pss.row(pss_name, note));
        let target = against(median, fewest * AMONG_OTHERS, "1.3 times that beside 10");
        rows.push(claims.row(claim_name, format!("claims beside {count} paused VMs; {target}")));
    }
    Ok(rows)
}

/// Whole lives, one after the other: birth, shell, claim, end.
pub(super) fn creates(bench: &Bench) -> anyhow::Result<Row> {
    let mut per_second = Histogram::new(Unit::PerSecond);
    let before = cpu_time()?;
    for _ in 0..LIVES {
        bench.claim()?;
    }
    let spent = cpu_time()?.saturating_sub(before);
    let lives = f64::from(LIVES) / spent.as_secs_f64();
    per_second.record(lives);
    Ok(per_second.row(
        CREATES,
        format!(
            "{LIVES} test guests from birth to end, over the processor time that they and this took; target: at least \
             {LIVES_PER_SECOND}; it is {:.2} of it",
            lives / LIVES_PER_SECOND
        ),
    ))
}

/// Processor time of this process and of those of its children that have ended.
pub(super) fn cpu_time() -> anyhow::Result<Duration> {
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
