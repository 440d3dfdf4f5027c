//! `stasis bench api`: figures of a running server, measured from outside by its API.
//!
//! ```text
//! pools full ─▶ memory of paused VMs ─▶ one request at a time ─▶ 1, 4, 8, 64 clients ─▶ a paused sandbox ─▶ table, report
//! ```

mod end;
mod invoke;
mod load;
mod rows;
mod sessions;
mod store;
mod vmm;

use std::{
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use http::{Request, StatusCode};
use serde::{Deserialize, de::DeserializeOwned};
use stasis_loadtest::{GuestKernel, Row, merge_into, table};
use stasis_pool_api::{PoolStatus, TemplateInfo, TemplateName};

use self::{
    load::{Subject, WARM_UP, count_clients},
    rows::{LeftOut, build_time, guest_alone, guest_null_request, kernel_note, paused_memory},
    sessions::Asked,
};
use crate::client::{
    ApiUrl, Outcome, Outgoing,
    http::{self as api, Connection},
    print, quietly,
};

const CLIENTS: [usize; 4] = [1, 4, 8, 64];
/// How long pools may take to be full, and how often they are asked.
const FULL: Duration = Duration::from_secs(60);
const ASK: Duration = Duration::from_millis(100);

/// Measurements.
#[derive(Debug, Clone, clap::Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure a running server by its API: latency and its phases, throughput, memory of paused VMs
    Api(ApiBench),
    /// Measure a hot hit beside the same request sent straight to the agent, and requests to a paused sandbox, on a server of its own (as root)
    Invoke(Box<invoke::InvokeBench>),
    /// Measure the VMM beside the bare limit of this host's KVM, with a guest of a few instructions (as root)
    Vmm(vmm::VmmBench),
    /// Measure a store of sandboxes' records on a disk
    Store(store::StoreBench),
}

/// What to measure, and where the figures go.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ApiBench {
    /// Add the figures to this report, a JSON list; those of the same names are replaced
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Template to invoke, by GET of its readiness path; if not given, wordcount or else the first one
    #[arg(long, value_name = "NAME")]
    template: Option<TemplateName>,
    /// How long to measure each of: one request at a time; 1, 4, 8 and 64 clients
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=3600))]
    seconds: u16,
}

/// Runs a `stasis bench` command.
///
/// # Errors
/// Where nothing could be measured, or the report could not be written.
pub(crate) async fn run(url: &ApiUrl, command: BenchCommand) -> anyhow::Result<ExitCode> {
    let json = match &command {
        BenchCommand::Api(command) => command.json.clone(),
        BenchCommand::Invoke(command) => command.json.clone(),
        BenchCommand::Vmm(command) => command.json.clone(),
        BenchCommand::Store(command) => command.json.clone(),
    };
    // Before minutes of measuring, not after.
    json.as_deref().map(stasis_loadtest::load).transpose()?;
    let rows = match command {
        BenchCommand::Api(command) => Box::pin(measure(url, &command)).await?,
        BenchCommand::Invoke(command) => invoke::measure(&command)?,
        // On this thread, which does nothing else meanwhile.
        BenchCommand::Vmm(command) => vmm::measure(&command)?,
        BenchCommand::Store(command) => store::measure(&command).await?,
    };
    if let Some(report) = &json {
        merge_into(report, &rows)?;
        tell(format_args!("the figures are in {}", report.display()));
    }
    quietly(print(&mut io::stdout(), table(&rows).as_bytes()).map(|()| Outcome::Success))
}

async fn measure(url: &ApiUrl, command: &ApiBench) -> anyhow::Result<Vec<Row>> {
    let length = Duration::from_secs(command.seconds.into());
    let mut connection = Connection::open(url).await?;
    let Templates { templates } = get(&mut connection, "/v1/templates").await?;
    let template = choose(&templates, command.template.as_ref())?;
    let pools = full_pools(&mut connection).await?;
    let memory = if connection.is_local() {
        paused_memory(&pools)
    } else {
        let reason = format!("{url} is another host, and only a host sees the memory of its processes: run this there");
        Err(LeftOut { reason, here: false })
    };
    // A forwarded port looks local; the processes tell.
    let here = memory.as_ref().map_or_else(|left_out| left_out.here, |_| true);
    let kernel = if here { GuestKernel::of_this_host().ok() } else { None };
    let subject = Subject {
        url,
        path: format!("/invoke/{}{}", template.spec.name, template.spec.ready.as_deref().unwrap_or("/")),
        guest: guest_alone(template),
        kernel: kernel_note(kernel),
    };

    tell(format_args!("{}: one request at a time, for {length:?} …", subject.path));
    let mut rows = subject.latency(length).await?;
    for clients in CLIENTS {
        tell(format_args!("{}: {}, for {WARM_UP:?} and {length:?} …", subject.path, count_clients(clients)));
        rows.push(subject.throughput(clients, length).await?);
    }
    tell(format_args!("a paused sandbox of {}: 64 requests at once …", template.spec.name));
    let asked = Asked { path: template.spec.ready.clone().unwrap_or_else(|| "/".into()), named: ".linux", works: None };
    let measured = sessions::resumes(url, &template.spec.name, &asked).await;
    rows.extend(measured.context("session.resume64_…: is --claim-budget of the server too short?")?);
    match memory {
        Ok(row) => rows.push(row),
        Err(LeftOut { reason, .. }) => tell(format_args!("paused_vm_pss_mib is left out: {reason}")),
    }
    rows.push(build_time(&templates));
    rows.push(guest_null_request(template, kernel));
    Ok(rows)
}

#[derive(Deserialize)]
struct Templates {
    templates: Vec<TemplateInfo>,
}

#[derive(Deserialize)]
struct Pools {
    pools: Vec<PoolStatus>,
}

async fn get<T: DeserializeOwned>(connection: &mut Connection, path: &str) -> anyhow::Result<T> {
    let answer = connection.send(Request::get(path).body(Outgoing::empty())?).await?;
    if answer.status() != StatusCode::OK {
        return Err(api::refusal(answer).await);
    }
    let body = api::read(answer.into_body()).await?;
    serde_json::from_slice(&body)
        .with_context(|| format!("the answer to {path} is not understood: use the server's own version of stasis"))
}

fn choose<'a>(templates: &'a [TemplateInfo], wanted: Option<&TemplateName>) -> anyhow::Result<&'a TemplateInfo> {
    let named = |name: &str| templates.iter().find(|info| info.spec.name.as_str() == name);
    match wanted {
        Some(wanted) => named(wanted.as_str())
            .with_context(|| format!("there is no template {wanted}: `stasis template list` shows those there are")),
        None => named("wordcount")
            .or_else(|| templates.first())
            .context("there is no template to invoke: build one with `stasis template build DIR`"),
    }
}

/// Waits until each pool has the VMs that it wants, so that all measurements begin from the same state.
async fn full_pools(connection: &mut Connection) -> anyhow::Result<Vec<PoolStatus>> {
    let begun = Instant::now();
    loop {
        let Pools { pools } = get(connection, "/v1/pools").await?;
        let Some(short) = pools.iter().find(|pool| pool.ready + pool.hot < pool.target) else { return Ok(pools) };
        if begun.elapsed() > FULL {
            let (PoolStatus { template, ready, target, .. }, failure) = (short, short.last_failure.as_deref());
            bail!(
                "the pool of {template} has {ready} of {target} VMs ready after {FULL:?}, and is not measured so; its last failure: {}",
                failure.unwrap_or("none, so the node may lack memory: see its log")
            );
        }
        tokio::time::sleep(ASK).await;
    }
}

/// A remark, beside the result.
fn tell(remark: std::fmt::Arguments<'_>) {
    // Who closed the standard error wants no remarks.
    let _ = writeln!(io::stderr(), "{remark}");
}

#[cfg(test)]
mod tests {
    use stasis_pool_api::TemplateSpec;

    use super::*;

    #[test]
    fn wordcount_is_measured_if_nobody_wants_another() {
        let info = |name: &str| TemplateInfo {
            spec: TemplateSpec::parse(&format!("name='{name}'\ncommand='x'")).unwrap(),
            digest: String::new(),
            created_at: 0,
            kernel_boot_id: String::new(),
            build_ms: 41_234,
            null_request_us: 80_360,
            memory_bytes: 0,
            made_with: stasis_pool_api::MadeWith::default(),
        };
        let templates = [info("a"), info("wordcount")];
        let name = |wanted: Option<&str>, of: &[TemplateInfo]| {
            let wanted = wanted.map(|name| name.parse().unwrap());
            choose(of, wanted.as_ref()).map(|info| info.spec.name.to_string()).map_err(|error| error.to_string())
        };
        assert_eq!(name(None, &templates).unwrap(), "wordcount");
        assert_eq!(name(None, &templates[..1]).unwrap(), "a");
        assert_eq!(name(Some("a"), &templates).unwrap(), "a");
        assert!(name(Some("b"), &templates).unwrap_err().contains("stasis template list"));
        assert!(name(None, &[]).unwrap_err().contains("stasis template build"));

        let row = build_time(&templates);
        assert_eq!((row.n, row.p50), (2, 41.234));
        let row = guest_null_request(&templates[0], Some(GuestKernel::Emulated));
        assert_eq!((row.n, row.p50), (1, 80.36));
        assert!(row.note.contains("guest kernel: emulated"), "{}", row.note);
    }
}
