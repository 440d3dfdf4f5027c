//! `stasis up`: gateway and node in one process.

mod detach;
mod preflight;

use std::{
    io::{self, Write},
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail};
use bytesize::ByteSize;
use futures_util::FutureExt as _;
use stasis_cow::{Volume, VolumeOptions};
use stasis_gateway::Tenants;
use stasis_pool::{Base, Cores, Jail, LocalNode, NodeConfig};
use stasis_pool_api::{Node, Tenant};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
};

use crate::{doctor, running::Running};

/// How long it may take to leave sandboxes' VMs, which waits ten seconds for what is being done to them, and all other VMs to end.
const END_LIMIT: Duration = Duration::from_secs(30);

/// What tells a server to bring its sandboxes to disk before it ends: `stasis down` sends it.
pub(crate) const SAVE: rustix::process::Signal = rustix::process::Signal::USR1;

/// What becomes of sandboxes when their server ends in order. Nothing of them is lost either way.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ending {
    /// Their VMs go on as they are, for the next server.
    Leave,
    /// They are brought to disk. Those that cannot be brought there go on as they are.
    Save,
}

/// vCPUs on a processor if none are asked for. Chosen, not measured: guests wait most of the time, and those that do not share.
const VCPU_OVERCOMMIT: u32 = 32;

/// What a VMM process keeps of the environment.
const LOG_VARIABLES: [&str; 2] = ["STASIS_LOG", "STASIS_LOG_JSON"];

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct UpArgs {
    /// Where the API listens
    #[arg(long, env = "STASIS_LISTEN", default_value = "127.0.0.1:3000", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Listen beyond loopback although nothing is encrypted, and without --tenants no key is asked for: whoever reaches the port can run code here
    #[arg(long, env = "STASIS_ALLOW_REMOTE")]
    allow_remote: bool,
    /// Data directory; where its file system has no reflink, an XFS image is made in it and mounted
    #[arg(long, env = "STASIS_DATA", default_value = ".stasis", value_name = "DIR")]
    data: PathBuf,
    /// Guest kernel for this host, an ELF vmlinux (`stasis doctor` says which variant)
    #[arg(long, env = "STASIS_KERNEL", value_name = "FILE")]
    kernel: PathBuf,
    /// The kernel's initial RAM disk, if it is a distribution's and not one of ours
    #[arg(long, env = "STASIS_INITRD", value_name = "FILE")]
    initrd: Option<PathBuf>,
    /// A root file system that templates may name as `base`
    #[arg(long = "base", env = "STASIS_BASES", value_delimiter = ',', required = true, value_name = "NAME=FILE")]
    bases: Vec<String>,
    /// Memory that all VMs together may be promised; three quarters of what is available if not given
    #[arg(long, env = "STASIS_MEMORY", value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// vCPUs that may be promised on each processor, to guests that may run
    #[arg(long, env = "STASIS_VCPU_OVERCOMMIT", default_value_t = VCPU_OVERCOMMIT, value_parser = clap::value_parser!(u32).range(1..=1024), value_name = "N")]
    vcpu_overcommit: u32,
    /// Size of the XFS image, where one is made
    #[arg(long, env = "STASIS_DISK", value_name = "SIZE")]
    disk: Option<ByteSize>,
    /// Longest body of an invocation
    #[arg(long, env = "STASIS_MAX_BODY", default_value = "64MiB", value_name = "SIZE")]
    max_body: ByteSize,
    /// How long an invocation may wait for a VM
    #[arg(long, env = "STASIS_CLAIM_BUDGET", default_value = "10s", value_name = "TIME")]
    claim_budget: humantime::Duration,
    /// A file of tenants and their keys (docs/api.md, "Tenants"). Then every request needs a key, and sees its tenant's only
    #[arg(long, env = "STASIS_TENANTS", value_name = "FILE")]
    tenants: Option<PathBuf>,
    /// First of the 4096 user ids that VMs run as, one each; no other user, and no other stasis, may have them
    #[arg(long, env = "STASIS_JAIL_UID_BASE", default_value_t = doctor::JAIL_UID_BASE, value_parser = clap::value_parser!(u32).range(1000..), value_name = "UID")]
    jail_uid_base: u32,
    /// What a VM may read, and write, per second from the data directory's disk; unlimited if not given
    #[arg(long, env = "STASIS_VM_DISK_RATE", value_name = "SIZE")]
    vm_disk_rate: Option<ByteSize>,
    /// Return once the server is ready, and leave it running; its log goes to stasis.log in the data directory
    #[arg(long)]
    detach: bool,
}

pub(crate) fn run(args: UpArgs) -> anyhow::Result<ExitCode> {
    if args.detach {
        prepare(&args)?;
        return detach::run(&args);
    }
    during(&args, async |_, address| {
        let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let mut save = signal(SignalKind::from_raw(SAVE.as_raw()))?;
        // A terminal that closes does not take a detached server with it.
        let _hangup = signal(SignalKind::hangup())?;
        // The first line on stdout is what `--detach` waits for.
        writeln!(io::stdout(), "ready http://{address}")?;
        let ending = tokio::select! {
            _ = terminate.recv() => Ending::Leave,
            _ = interrupt.recv() => Ending::Leave,
            _ = save.recv() => Ending::Save,
        };
        tracing::info!(?ending, "stopping");
        Ok(((), ending))
    })?;
    tracing::info!("stopped");
    Ok(ExitCode::SUCCESS)
}

fn prepare(args: &UpArgs) -> anyhow::Result<()> {
    preflight::check(args)?;
    std::fs::create_dir_all(&args.data).with_context(|| format!("the data directory {}", args.data.display()))
}

/// Runs a server for as long as `work` takes, which gets its node and its address, and says how the server is to end. What it has made is
/// removed, but for what VMs that go on need.
///
/// # Errors
/// The server did not come up or did not end, or the work's.
pub(crate) fn during<T>(
    args: &UpArgs,
    work: impl AsyncFnOnce(Arc<dyn Node>, SocketAddr) -> anyhow::Result<(T, Ending)>,
) -> anyhow::Result<T> {
    prepare(args)?;
    let listener = TcpListener::bind(args.listen).with_context(|| {
        format!(
            "cannot listen on {}: is a stasis running already (`make down`)? --listen takes another address",
            args.listen
        )
    })?;
    listener.set_nonblocking(true)?;

    let options = VolumeOptions { image_bytes: args.disk.map(|size| size.as_u64()), ..VolumeOptions::default() };
    let volume = Volume::open(&args.data, &options)?;
    let served = run_on(args, listener, &volume, work);
    // Whether it served or failed to start: nothing stays behind but VMs that go on, and what they hold open.
    let left =
        served.as_ref().map_or_else(|_| stasis_pool::count_orphans(volume.path()).unwrap_or(0), |(_, left)| *left);
    let closed = if left == 0 {
        volume.close().context("the data directory stays mounted; `stasis down` tries again")
    } else {
        tracing::warn!(vms = left, "sandboxes' VMs go on: `stasis up` takes them over, `stasis down --kill` ends them");
        Ok(())
    };
    Running::forget(&args.data)?;
    let (done, _) = served?;
    closed?;
    Ok(done)
}

fn run_on<T>(
    args: &UpArgs,
    listener: TcpListener,
    volume: &Volume,
    work: impl AsyncFnOnce(Arc<dyn Node>, SocketAddr) -> anyhow::Result<(T, Ending)>,
) -> anyhow::Result<(T, usize)> {
    Running::record(&args.data).context("the pid file")?;
    let tenants = preflight::tenants(args)?;
    let config = node_config(args, &tenants, volume)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(serve(args, tenants, listener, config, work));
    if let Ok((_, None)) = served {
        // Sandboxes' VMs that have not been left would end with the runtime. So it ends with the process, as if that were killed.
        std::mem::forget(runtime);
        bail!("VMs have not ended within {END_LIMIT:?}");
    }
    // Whatever still holds files of the volume ends with the runtime.
    runtime.shutdown_timeout(END_LIMIT);
    served.map(|(done, left)| (done, left.unwrap_or(0)))
}

/// Returns what came of the work, and how many VMs go on; none if that took too long.
async fn serve<T>(
    args: &UpArgs,
    tenants: Tenants,
    listener: TcpListener,
    config: NodeConfig,
    work: impl AsyncFnOnce(Arc<dyn Node>, SocketAddr) -> anyhow::Result<(T, Ending)>,
) -> anyhow::Result<(T, Option<usize>)> {
    let metrics = stasis_gateway::install_recorder()?;
    stasis_pool::try_jail(&config.vmm, &config.jail)
        .await
        .map_err(|reason| anyhow::anyhow!("VMM processes cannot be jailed here: {reason}; see `stasis doctor`"))?;
    let node = Arc::new(LocalNode::start(&config).await?);
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    let gateway = stasis_gateway::Config {
        max_body: args.max_body.as_u64(),
        claim_budget: args.claim_budget.into(),
        tenants,
        ..stasis_gateway::Config::default()
    };
    tracing::info!(%address, data = %args.data.display(), "ready");
    let (done, shutdown) = oneshot::channel::<()>();
    let worker = async {
        let outcome = work(node.clone(), address).await;
        drop(done);
        outcome
    };
    // It shuts down when the worker's end of the channel is gone.
    let shutdown = shutdown.map(drop);
    let ((), outcome) = tokio::join!(stasis_gateway::serve(listener, node.clone(), gateway, metrics, shutdown), worker);
    if let Ok((_, Ending::Save)) = &outcome {
        node.save().await;
    }
    let left = tokio::time::timeout(END_LIMIT, node.leave()).await.ok();
    outcome.map(|(done, _)| (done, left))
}

fn node_config(args: &UpArgs, tenants: &Tenants, volume: &Volume) -> anyhow::Result<NodeConfig> {
    let memory = match args.memory {
        Some(memory) => memory,
        None => ByteSize::b(doctor::available_memory()? / 4 * 3),
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(NodeConfig {
        vmm: std::env::current_exe().context("the path of this program")?,
        data: volume.path().to_owned(),
        kernel: args.kernel.clone(),
        initrd: args.initrd.clone(),
        variant: doctor::kernel_variant()?,
        bases: args.bases.iter().map(|base| parse_base(base)).collect::<anyhow::Result<_>>()?,
        memory,
        cores: Cores { count: u32::try_from(cores).unwrap_or(u32::MAX), overcommit: args.vcpu_overcommit },
        jail: Jail {
            uid_base: args.jail_uid_base,
            disk_rate: args.vm_disk_rate,
            // What the log is to hold; nothing else of ours is a VMM's business.
            environment: std::env::vars_os().filter(|(name, _)| LOG_VARIABLES.iter().any(|log| name == log)).collect(),
        },
        standing_tenant: Some(Tenant::default()).filter(|tenant| tenants.is_everybody() || tenants.names(tenant)),
        restores_at_once: cores * 2,
        repairs_at_once: cores,
    })
}

fn parse_base(text: &str) -> anyhow::Result<Base> {
    match text.split_once('=') {
        Some((name, image)) if !name.is_empty() && !image.is_empty() => {
            Ok(Base { name: name.to_owned(), image: image.into() })
        }
        _ => bail!("--base {text:?} is not NAME=FILE"),
    }
}
