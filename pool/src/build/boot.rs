//! The build's VM: booted once, parked when its function is ready, snapshotted, ended.

use std::{fs::File, time::Duration};

use stasis_cow::Staging;
use stasis_guest_wire::{
    BOOT_PORT,
    boot::{FromAgent, FromNode, Start},
    page::WakePage,
};
use stasis_pool_api::{BuildFailure, BuildStep, MadeWith};
use stasis_vmm_api::{Reply, Request};
use tokio::{io::AsyncReadExt, net::UnixStream};

use super::{Job, Progress, Workshop, platform};
use crate::{
    admission::Reservation,
    agent,
    restore::open_kvm,
    template::{machine, part},
    vmm::{GuestStreams, Vmm, VmmError},
};

/// From power-on to the agent's first word. Where guest kernel code is interpreted this takes some 20 s of CPU time, which a busy
/// machine may take minutes to give.
const BOOT_LIMIT: Duration = Duration::from_secs(300);
/// What the agent may take to say that the function did not become ready, beyond the function's own time.
const READY_SLACK: Duration = Duration::from_secs(30);
/// From the order to park to the closed connection.
const PARK_LIMIT: Duration = Duration::from_secs(60);

/// How long a parked guest may take to say that it rests. Chosen: it says so after milliseconds, or at last while it still looks at its page; one that
/// is not heard serves all the same, later.
const REST_LIMIT: Duration = Duration::from_secs(5);

/// The disks of the VM.
pub(super) struct Disks {
    pub(super) root: File,
    pub(super) app: File,
}

/// What was learnt.
pub(super) struct Booted {
    pub(super) kernel_boot_id: String,
    pub(super) null_request_us: u64,
    pub(super) memory_bytes: u64,
    pub(super) made_with: MadeWith,
}

pub(super) async fn run(
    workshop: &Workshop,
    job: &Job,
    reservation: Reservation,
    disks: Disks,
    staging: &Staging,
    progress: &Progress,
) -> Result<Booted, BuildFailure> {
    progress.step(BuildStep::Boot).await;
    let kernel = File::open(&workshop.kernel)
        .map_err(|error| platform(format!("the guest kernel {}: {error}", workshop.kernel.display())))?;
    let kvm = open_kvm().map_err(platform)?;
    let machine = machine(&job.spec);
    let (vmm, streams) = Vmm::spawn(&workshop.spawner, &machine, reservation).await.map_err(platform)?;
    vmm.order(Request::Prepare { machine, restores: false }, vec![kvm.into()]).await.map_err(platform)?;
    let initrd = workshop.initrd.as_ref().map(|path| {
        File::open(path)
            .map_err(|error| platform(format!("the guest kernel's initial RAM disk {}: {error}", path.display())))
    });
    let initrd = initrd.transpose()?;
    let boot = Request::Boot { cmdline: workshop.cmdline().to_owned(), initrd: initrd.is_some() };
    let files =
        [Some(kernel), initrd, Some(disks.root), Some(disks.app)].into_iter().flatten().map(Into::into).collect();
    let outcome = tokio::select! {
        outcome = converse(&vmm, streams, boot, files, job, staging, progress) => outcome,
        fate = vmm.ended() => Err(Trouble::Stopped(fate.guest.map_or_else(
            || "the VMM process ended".to_owned(),
            |ended| ended.why.to_string(),
        ))),
    };
    match outcome {
        Ok(booted) => Ok(booted),
        Err(trouble) => Err(trouble.into_failure(vmm.console().await)),
    }
}

enum Trouble {
    NotReady { reason: String, output: String },
    Stopped(String),
    Other(String),
}

impl Trouble {
    fn into_failure(self, console: String) -> BuildFailure {
        match self {
            Self::NotReady { reason, output } => BuildFailure::NotReady { reason, output, console },
            Self::Stopped(reason) | Self::Other(reason) => BuildFailure::Platform { reason, console },
        }
    }
}

impl From<VmmError> for Trouble {
    fn from(error: VmmError) -> Self {
        Self::Other(error.to_string())
    }
}

fn other(reason: impl ToString) -> Trouble {
    Trouble::Other(reason.to_string())
}

async fn converse(
    vmm: &Vmm,
    mut streams: GuestStreams,
    boot: Request,
    files: Vec<std::os::fd::OwnedFd>,
    job: &Job,
    staging: &Staging,
    progress: &Progress,
) -> Result<Booted, Trouble> {
    vmm.call(boot, files).await?;
    vmm.order(Request::Resume, Vec::new()).await?;
    let mut agent = within(BOOT_LIMIT, "the guest did not reach its agent", accept(&mut streams)).await??;
    let hello = within(BOOT_LIMIT, "the agent did not say hello", agent::receive(&mut agent)).await?.map_err(other)?;
    let FromAgent::Hello { boot_id: kernel_boot_id, agent_version, kernel_release } = hello else {
        return Err(other("the agent spoke out of turn"));
    };

    let made_with =
        MadeWith { stasis: env!("CARGO_PKG_VERSION").to_owned(), agent: agent_version, guest_kernel: kernel_release };

    progress.step(BuildStep::Start).await;
    agent::send(&mut agent, &FromNode::Start(start(job)?)).await.map_err(other)?;
    let limit = job.spec.ready_timeout + READY_SLACK;
    let answer =
        within(limit, "the agent did not say whether the function is ready", agent::receive(&mut agent)).await?;
    let null_requests = match answer.map_err(other)? {
        FromAgent::Ready { null_requests, .. } => null_requests,
        FromAgent::Failed { reason, output } => return Err(Trouble::NotReady { reason, output }),
        FromAgent::Hello { .. } | FromAgent::Parked { .. } => return Err(other("the agent spoke out of turn")),
    };

    progress.step(BuildStep::Snapshot).await;
    agent::send(&mut agent, &FromNode::Park).await.map_err(other)?;
    let wake_page = within(PARK_LIMIT, "the agent did not park", parked(agent)).await??;
    if wake_page.is_some() {
        match tokio::time::timeout(REST_LIMIT, vmm.rests()).await {
            Ok(rests) => {
                rests?;
                tracing::info!(template = %job.spec.name, "its guest rests");
            }
            Err(_) => tracing::warn!(
                template = %job.spec.name,
                "its guest did not say that it rests: what it did at the snapshot delays each restored one's first answer"
            ),
        }
    }
    vmm.order(Request::Pause, Vec::new()).await?;
    if let Some(WakePage { address, token }) = wake_page
        && let Err(error) = vmm.order(Request::WakePage { address, token }, Vec::new()).await
    {
        // It serves all the same: orders reach it by vsock, later.
        tracing::warn!(template = %job.spec.name, %error, "the template has no wake page");
    }
    let [memory, state] = [part::MEMORY, part::STATE].map(|name| create(staging, name));
    match vmm.call(Request::Snapshot, vec![memory?, state?]).await? {
        Reply::Snapshotted(report) => Ok(Booted {
            kernel_boot_id,
            null_request_us: median_us(null_requests),
            memory_bytes: report.written_bytes,
            made_with,
        }),
        reply => Err(VmmError::Protocol(Box::new(reply)).into()),
    }
}

async fn accept(streams: &mut GuestStreams) -> Result<UnixStream, Trouble> {
    while let Some((port, stream)) = streams.recv().await {
        if port == BOOT_PORT {
            stream.set_nonblocking(true).map_err(other)?;
            return UnixStream::from_std(stream).map_err(other);
        }
    }
    Err(other("the VMM process ended"))
}

/// Waits for the agent's last word and the connection's end; where it then waits.
async fn parked(mut agent: UnixStream) -> Result<Option<WakePage>, Trouble> {
    let wake_page = match agent::receive(&mut agent).await.map_err(other)? {
        FromAgent::Parked { wake_page } => wake_page,
        FromAgent::Failed { reason, output } => return Err(Trouble::NotReady { reason, output }),
        FromAgent::Hello { .. } | FromAgent::Ready { .. } => {
            return Err(other("the agent spoke out of turn"));
        }
    };
    let mut rest = Vec::new();
    agent.read_to_end(&mut rest).await.map_err(other)?;
    if rest.is_empty() { Ok(wake_page) } else { Err(other("the agent spoke out of turn")) }
}

async fn within<T>(limit: Duration, what: &str, work: impl Future<Output = T>) -> Result<T, Trouble> {
    tokio::time::timeout(limit, work).await.map_err(|_| other(format!("{what} within {limit:?}")))
}

fn start(job: &Job) -> Result<Start, Trouble> {
    let spec = &job.spec;
    Ok(Start {
        command: spec.command.clone(),
        port: spec.port,
        ready_path: spec.ready.clone(),
        ready_timeout: spec.ready_timeout,
        env: spec.env.clone(),
        wall_clock_ns: match job.clock_ns {
            Some(nanoseconds) => nanoseconds,
            None => agent::wall_clock_ns().map_err(other)?,
        },
    })
}

fn create(staging: &Staging, name: &str) -> Result<std::os::fd::OwnedFd, Trouble> {
    let path = staging.path(name);
    let file = File::options().read(true).write(true).create_new(true).open(&path);
    Ok(file.map_err(|error| other(format!("{}: {error}", path.display())))?.into())
}

fn median_us(mut times: Vec<Duration>) -> u64 {
    times.sort();
    times.get(times.len() / 2).map_or(0, |median| u64::try_from(median.as_micros()).unwrap_or(u64::MAX))
}
