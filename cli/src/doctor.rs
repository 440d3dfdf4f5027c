//! `stasis doctor`: what this host offers, and what to do about what it lacks.

mod checks;

use std::{
    fs::{self, File},
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Context;
use serde::Serialize;
use stasis_pool::KernelVariant;

/// The first uid of VMs, if no other is given.
pub(crate) const JAIL_UID_BASE: u32 = 200_000;

/// The device behind everything.
const KVM: &str = "/dev/kvm";

#[derive(Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    /// The data directory to judge
    #[arg(long, env = "STASIS_DATA", default_value = ".stasis", value_name = "DIR")]
    data: PathBuf,
    /// Print the findings as JSON
    #[arg(long)]
    json: bool,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    Ok,
    /// Stasis runs, but lacks something.
    Limited,
    /// Stasis cannot run.
    Missing,
}

/// What one check found.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Finding {
    name: &'static str,
    verdict: Verdict,
    found: String,
    /// What to do about it, where there is something to do.
    remedy: Option<&'static str>,
}

pub(crate) fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let findings = checks::all(&args.data);
    let mut out = io::stdout();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &findings)?;
        writeln!(out)?;
    } else {
        for Finding { name, verdict, found, remedy } in &findings {
            let mark = match verdict {
                Verdict::Ok => "ok     ",
                Verdict::Limited => "limited",
                Verdict::Missing => "MISSING",
            };
            writeln!(out, "{mark}  {name:<14} {found}")?;
            if let Some(remedy) = remedy {
                writeln!(out, "         {:<14} → {remedy}", "")?;
            }
        }
    }
    let missing = findings.iter().any(|finding| finding.verdict == Verdict::Missing);
    Ok(if missing { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Opens `/dev/kvm`, or says in one line what to do.
pub(crate) fn open_kvm() -> anyhow::Result<File> {
    File::options().read(true).write(true).open(KVM).with_context(|| {
        format!("{KVM} cannot be opened: enable virtualisation (or nested virtualisation, in a VM) and load the kvm modules, as root")
    })
}

/// Which guest kernel this host needs: with neither VMX nor SVM, KVM interprets guest kernel code.
pub(crate) fn kernel_variant() -> anyhow::Result<KernelVariant> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").context("/proc/cpuinfo")?;
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let hardware = flags.split_whitespace().any(|flag| matches!(flag, "vmx" | "svm"));
    Ok(if hardware { KernelVariant::Hw } else { KernelVariant::Emulated })
}

/// Memory that new programs can have without swapping, in bytes (`MemAvailable`, proc(5)).
pub(crate) fn available_memory() -> anyhow::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|number| number.parse::<u64>().ok())
        .context("/proc/meminfo has no MemAvailable")?;
    Ok(kib * 1024)
}
