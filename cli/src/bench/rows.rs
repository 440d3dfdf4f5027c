//! Figures that need no load: memory, builds, and the guest by itself.

use std::time::Duration;

use stasis_loadtest::{GuestKernel, Histogram, PssError, Row, Unit, pss_of_vm};
use stasis_pool_api::{PoolStatus, TemplateInfo};

/// Why there is no figure for the memory, and whether the VMs run on this host all the same.
pub(super) struct LeftOut {
    pub(super) reason: String,
    pub(super) here: bool,
}

impl From<PssError> for LeftOut {
    fn from(error: PssError) -> Self {
        let here = !matches!(error, PssError::Gone(_) | PssError::NotAVm(_));
        Self { reason: format!("{:#}", anyhow::Error::new(error)), here }
    }
}

pub(super) fn paused_memory(pools: &[PoolStatus]) -> Result<Row, LeftOut> {
    let mut histogram = Histogram::new(Unit::Mebibytes);
    let (mut of, mut gone) = (Vec::new(), None);
    for pool in pools {
        let before = histogram.len();
        for &pid in &pool.ready_pids {
            match pss_of_vm(pid) {
                #[allow(clippy::cast_precision_loss, reason = "no VM has 2^53 bytes")]
                Ok(bytes) => histogram.record(bytes as f64 / f64::from(1 << 20)),
                // Perhaps it was claimed meanwhile, by somebody else.
                Err(error @ PssError::Gone(_)) => gone = Some(error),
                Err(error) => return Err(error.into()),
            }
        }
        if histogram.len() > before {
            of.push(format!("{} of {}", histogram.len() - before, pool.template));
        }
    }
    if histogram.is_empty() {
        let reason = "no pool keeps VMs ready: set pool.min in a template.toml".into();
        return Err(gone.map_or(LeftOut { reason, here: false }, LeftOut::from));
    }
    let note = format!(
        "PSS of each paused VM's process: {}; pages shared with other VMs count by their share, so more VMs make it less",
        of.join(", ")
    );
    Ok(histogram.row("paused_vm_pss_mib", note))
}

pub(super) fn build_time(templates: &[TemplateInfo]) -> Row {
    let mut histogram = Histogram::new(Unit::Seconds);
    let mut of = Vec::new();
    for info in templates {
        let took = Duration::from_millis(info.build_ms);
        histogram.record_time(took);
        of.push(format!("{} {:.1} s", info.spec.name, took.as_secs_f64()));
    }
    histogram.row("template_build_s", format!("from the archive to its publication, one build each: {}", of.join(", ")))
}

pub(super) fn guest_null_request(template: &TemplateInfo, kernel: Option<GuestKernel>) -> Row {
    let mut histogram = Histogram::new(Unit::Millis);
    histogram.record_time(template.null_request());
    let note = format!(
        "{}: median of a few requests to the readiness path, made inside the guest at build, without gateway, claim and repair; {}",
        template.spec.name,
        kernel_note(kernel)
    );
    histogram.row("guest_null_request_ms", note)
}

/// The guest's share, and with it the emulator's.
pub(super) fn guest_alone(template: &TemplateInfo) -> String {
    let millis = template.null_request().as_secs_f64() * 1e3;
    format!("the guest alone: {millis:.3} ms (measured inside the guest)")
}

pub(super) fn kernel_note(kernel: Option<GuestKernel>) -> String {
    match kernel {
        Some(kernel) => format!("guest kernel: {kernel}"),
        None => "guest kernel: unknown from here".into(),
    }
}
