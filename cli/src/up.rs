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
use stasis_cow::{Volume, VolumeOptions};
use stasis_pool::{Base, LocalNode, NodeConfig};
use tokio::signal::unix::{SignalKind, signal};

use crate::{doctor, running::Running};

/// How long VMs may take to end.
const END_LIMIT: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct UpArgs {
    /// Where the API listens
    #[arg(long, env = "STASIS_LISTEN", default_value = "127.0.0.1:3000", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Listen beyond loopback although this version checks no keys: whoever reaches the port can run code here
    #[arg(long, env = "STASIS_ALLOW_REMOTE")]
    allow_remote: bool,
    /// Data directory; where its file system has no reflink, an XFS image is made in it and mounted
    #[arg(long, env = "STASIS_DATA", default_value = ".stasis", value_name = "DIR")]
    data: PathBuf,
    /// Guest kernel for this host, an ELF vmlinux (`stasis doctor` says which variant)
    #[arg(long, env = "STASIS_KERNEL", value_name = "FILE")]
    kernel: PathBuf,
    /// A root file system that templates may name as `base`
    #[arg(long = "base", env = "STASIS_BASES", value_delimiter = ',', required = true, value_name = "NAME=FILE")]
    bases: Vec<String>,
    /// Memory that all VMs together may be promised; three quarters of what is available if not given
    #[arg(long, env = "STASIS_MEMORY", value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// Size of the XFS image, where one is made
    #[arg(long, env = "STASIS_DISK", value_name = "SIZE")]
    disk: Option<ByteSize>,
    /// Longest body of an invocation
    #[arg(long, env = "STASIS_MAX_BODY", default_value = "64MiB", value_name = "SIZE")]
    max_body: ByteSize,
    /// How long an invocation may wait for a VM
    #[arg(long, env = "STASIS_CLAIM_BUDGET", default_value = "10s", value_name = "TIME")]
    claim_budget: humantime::Duration,
    /// Return once the server is ready, and leave it running; its log goes to stasis.log in the data directory
    #[arg(long)]
    detach: bool,
}

pub(crate) fn run(args: UpArgs) -> anyhow::Result<ExitCode> {
    preflight::check(&args)?;
    std::fs::create_dir_all(&args.data).with_context(|| format!("the data directory {}", args.data.display()))?;
    if args.detach {
        return detach::run(&args);
    }
    let listener = TcpListener::bind(args.listen).with_context(|| {
        format!(
            "cannot listen on {}: is a stasis running already (`make down`)? --listen takes another address",
            args.listen
        )
    })?;
    listener.set_nonblocking(true)?;

    let options = VolumeOptions { image_bytes: args.disk.map(|size| size.as_u64()), ..VolumeOptions::default() };
    let volume = Volume::open(&args.data, &options)?;
    let served = run_on(&args, listener, &volume);
    // Whether it served or failed to start: nothing stays behind.
    let closed = volume.close().context("the data directory stays mounted; `stasis down` tries again");
    Running::forget(&args.data)?;
    served.and(closed)?;
    tracing::info!("stopped");
    Ok(ExitCode::SUCCESS)
}

fn run_on(args: &UpArgs, listener: TcpListener, volume: &Volume) -> anyhow::Result<()> {
    Running::record(&args.data).context("the pid file")?;
    let config = node_config(args, volume)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(serve(args, listener, config));
    // Whatever still holds files of the volume ends with the runtime.
    runtime.shutdown_timeout(END_LIMIT);
    served
}

async fn serve(args: &UpArgs, listener: TcpListener, config: NodeConfig) -> anyhow::Result<()> {
    let metrics = stasis_gateway::install_recorder()?;
    let node = Arc::new(LocalNode::start(&config)?);
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    let gateway = stasis_gateway::Config {
        max_body: args.max_body.as_u64(),
        claim_budget: args.claim_budget.into(),
        ..stasis_gateway::Config::default()
    };
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    // A terminal that closes does not take a detached server with it.
    let _hangup = signal(SignalKind::hangup())?;
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping");
    };
    tracing::info!(%address, data = %args.data.display(), "ready");
    // The first line on stdout is what `--detach` waits for.
    writeln!(io::stdout(), "ready http://{address}")?;
    stasis_gateway::serve(listener, node.clone(), gateway, metrics, shutdown).await;
    if tokio::time::timeout(END_LIMIT, node.stop()).await.is_err() {
        bail!("VMs have not ended within {END_LIMIT:?}");
    }
    Ok(())
}

fn node_config(args: &UpArgs, volume: &Volume) -> anyhow::Result<NodeConfig> {
    let memory = match args.memory {
        Some(memory) => memory,
        None => ByteSize::b(doctor::available_memory()? / 4 * 3),
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(NodeConfig {
        vmm: std::env::current_exe().context("the path of this program")?,
        data: volume.path().to_owned(),
        kernel: args.kernel.clone(),
        variant: doctor::kernel_variant()?,
        bases: args.bases.iter().map(|base| parse_base(base)).collect::<anyhow::Result<_>>()?,
        memory,
        restores_at_once: cores * 2,
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
