//! A folder becomes a template.
//!
//! ```text
//!  archive ─▶ folder, spec, digest ─▶ (known already: unchanged)
//!     └─▶ admission ─▶ disks ─▶ boot ─▶ start, ready ─▶ park ─▶ pause, snapshot ─▶ publish
//! ```
//!
//! Until the last step, everything lies in a staging folder that vanishes with the build.

mod archive;
mod boot;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use stasis_cow::{Digester, Staging};
use stasis_pool_api::{
    Archive, BuildEvent, BuildFailure, BuildStep, MemoryForm, NoCapacity, TemplateInfo, TemplateSpec,
};
use tokio::sync::mpsc;

use crate::{
    admission::{Charge, Full, Reservation},
    config::KernelVariant,
    pool::Shared,
    template::{Template, part},
    vmm::Spawner,
};

/// Raised when templates of older builds must not be taken for the same.
const BUILD_FORMAT: u32 = 6;
/// Disk kept free beside what a build needs.
const DISK_MARGIN: u64 = 256 << 20;
/// When to come back to a full disk. Chosen: only a person makes room there.
const DISK_RETRY: Duration = Duration::from_secs(30);

/// What builds work with.
#[derive(Debug)]
pub(crate) struct Workshop {
    pub(crate) shared: Arc<Shared>,
    /// Where VMM processes come from.
    pub(crate) spawner: Spawner,
    /// Where templates are published, by name and digest.
    pub(crate) templates: PathBuf,
    /// The data folder, whose free space counts.
    pub(crate) data: PathBuf,
    pub(crate) kernel: PathBuf,
    pub(crate) initrd: Option<PathBuf>,
    pub(crate) variant: KernelVariant,
    pub(crate) kernel_digest: String,
    /// Imported bases: name, image, digest.
    pub(crate) bases: Vec<ImportedBase>,
}

/// A base in the data folder.
#[derive(Debug, Clone)]
pub(crate) struct ImportedBase {
    pub(crate) name: String,
    pub(crate) image: PathBuf,
    pub(crate) digest: String,
}

/// A build that was accepted.
pub(crate) struct Job {
    pub(crate) spec: TemplateSpec,
    pub(crate) digest: String,
    source: Source,
    started: Instant,
    /// The wall clock that the function is started with, nanoseconds since the Unix epoch; the host's where none is given.
    clock_ns: Option<u64>,
}

/// What a template's disks are made of.
enum Source {
    /// A folder that was sent, and a base.
    Folder { folder: archive::Unpacked, base: ImportedBase },
    /// Those of an earlier build, which were consistent when it was parked.
    Earlier(Arc<Template>),
}

/// Tells the caller how far a build is.
pub(crate) struct Progress {
    events: mpsc::Sender<BuildEvent>,
    started: Instant,
}

impl Progress {
    pub(crate) fn new(events: mpsc::Sender<BuildEvent>, job: &Job) -> Self {
        Self { events, started: job.started }
    }

    /// Nobody asked for the build, so nobody is told.
    pub(crate) fn untold(job: &Job) -> Self {
        Self::new(mpsc::channel(1).0, job)
    }

    async fn step(&self, step: BuildStep) {
        tracing::info!(?step, "template build");
        let elapsed_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        // A caller that no longer listens does not stop the build.
        let _ = self.events.send(BuildEvent::Step { step, elapsed_ms }).await;
    }

    pub(crate) async fn end(self, event: BuildEvent) {
        let _ = self.events.send(event).await;
    }
}

pub(crate) fn platform(reason: impl ToString) -> BuildFailure {
    BuildFailure::Platform { reason: reason.to_string(), console: String::new() }
}

fn full(error: Full) -> BuildFailure {
    let NoCapacity { resource, needed, available, .. } = error.what;
    BuildFailure::NoCapacity { resource: resource.as_str().into(), needed, available, retry_after: error.retry_after }
}

impl Workshop {
    /// The guest's kernel command line.
    pub(crate) fn cmdline(&self) -> &'static str {
        self.variant.cmdline(self.initrd.is_some())
    }

    /// Receives and checks an archive. Nothing has been started when it is refused.
    pub(crate) async fn accept(&self, archive: Archive, clock_ns: Option<u64>) -> Result<Job, BuildFailure> {
        let started = Instant::now();
        let invalid = |reason: String| BuildFailure::Invalid { reason };
        let folder = archive::receive(archive, &self.data).await?;
        let text =
            folder.spec().map_err(|error| invalid(format!("the folder has no readable template.toml: {error}")))?;
        let spec = TemplateSpec::parse(&text).map_err(|error| invalid(error.to_string()))?;
        let base = self.bases.iter().find(|base| base.name == spec.base).cloned().ok_or_else(|| {
            let known: Vec<_> = self.bases.iter().map(|base| base.name.as_str()).collect();
            invalid(format!("there is no base {:?}; this node has: {}", spec.base, known.join(", ")))
        })?;
        if self.variant == KernelVariant::Emulated && spec.cpu > 1 {
            return Err(invalid(format!(
                "cpu is {}, but this host's guest kernel has one vCPU (see `stasis doctor`)",
                spec.cpu
            )));
        }
        let content = {
            let path = folder.path().to_owned();
            blocking(move || stasis_cow::digest_folder(&path)).await?
        };
        let digest = Digester::new("stasis template")
            .part("format", &BUILD_FORMAT.to_le_bytes())
            .part("kernel", self.kernel_digest.as_bytes())
            .part("cmdline", self.cmdline().as_bytes())
            .part("base", base.digest.as_bytes())
            .part("folder", content.to_string().as_bytes())
            .part("clock", format!("{clock_ns:?}").as_bytes())
            .finish()
            .to_string();
        Ok(Job { spec, digest, source: Source::Folder { folder, base }, started, clock_ns })
    }

    /// Builds a template again from its own disks.
    pub(crate) fn again(&self, template: Arc<Template>) -> Job {
        let info = template.info();
        let (spec, digest) = (info.spec.clone(), info.digest.clone());
        Job { spec, digest, source: Source::Earlier(template), started: Instant::now(), clock_ns: None }
    }

    /// Reserves what the build needs, before anything starts.
    pub(crate) async fn admit(&self, job: &Job) -> Result<Reservation, BuildFailure> {
        let files = match &job.source {
            Source::Folder { folder, .. } => folder.bytes() * 2,
            Source::Earlier(_) => 0, // clones
        };
        let needed = job.spec.memory.as_u64() + files + DISK_MARGIN;
        let available = free_bytes(&self.data)?;
        if available < needed {
            return Err(BuildFailure::NoCapacity {
                resource: "disk".into(),
                needed,
                available,
                retry_after: DISK_RETRY,
            });
        }
        let guest = Charge::alone(job.spec.memory_mib(), job.spec.cpu);
        self.shared.admission.admit_returning(guest, None).await.map_err(full)
    }

    /// Builds and publishes.
    pub(crate) async fn build(
        &self,
        job: &Job,
        reservation: Reservation,
        progress: &Progress,
    ) -> Result<Template, BuildFailure> {
        progress.step(BuildStep::Disk).await;
        let home = self.templates.join(job.spec.name.as_str());
        std::fs::create_dir_all(&home).map_err(platform)?;
        let staging = Staging::new(&home).map_err(platform)?;
        let disks = self.make_disks(job, &staging).await?;

        let booted = boot::run(self, job, reservation, disks, &staging, progress).await?;

        progress.step(BuildStep::Publish).await;
        if job.spec.snapshot.memory == MemoryForm::Compressed {
            let (raw, frames) = (staging.path(part::MEMORY), staging.path(part::FRAMES));
            blocking(move || compress(&raw, &frames)).await?;
        }
        let created_at = SystemTime::now().duration_since(UNIX_EPOCH).map_err(platform)?.as_secs();
        let created_at = job.clock_ns.map_or(created_at, |nanoseconds| nanoseconds / 1_000_000_000);
        let info = TemplateInfo {
            spec: job.spec.clone(),
            digest: job.digest.clone(),
            created_at,
            kernel_boot_id: booted.kernel_boot_id,
            build_ms: u64::try_from(job.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            null_request_us: booted.null_request_us,
            memory_bytes: booted.memory_bytes,
            made_with: booted.made_with,
        };
        let details = serde_json::to_value(&info).map_err(platform)?;
        let short = job.digest.get(..16).unwrap_or(&job.digest);
        let place = home.join(match job.source {
            Source::Folder { .. } => short.to_owned(),
            // Beside the earlier one, which stays until this one is there.
            Source::Earlier(_) => format!("{short}-{created_at}"),
        });
        blocking(move || {
            // A version that is refused must not stand in the way of its rebuild.
            if place.exists() {
                std::fs::remove_dir_all(&place).map_err(|error| error.to_string())?;
            }
            staging.publish(&place, details, created_at).map_err(|error| chain(&error))?;
            Template::open(&place).map_err(|error| chain(&error))
        })
        .await
    }

    async fn make_disks(&self, job: &Job, staging: &Staging) -> Result<boot::Disks, BuildFailure> {
        let (root, app) = (staging.path(part::DISK), staging.path(part::APP));
        let (folder, base) = match &job.source {
            Source::Folder { folder, base } => (folder.path().to_owned(), base.image.clone()),
            Source::Earlier(template) => {
                let template = Arc::clone(template);
                return blocking(move || {
                    let clone = |name, to: &Path| {
                        let part = template.part(name).map_err(|error| chain(&error))?;
                        stasis_cow::clone_file(part, to).map_err(|error| chain(&error))
                    };
                    Ok::<_, String>(boot::Disks { root: clone(part::DISK, &root)?, app: clone(part::APP, &app)? })
                })
                .await;
            }
        };
        let size = job.spec.disk.as_u64();
        blocking(move || -> Result<_, String> {
            let base = std::fs::File::open(&base).map_err(|error| format!("{}: {error}", base.display()))?;
            let file = stasis_cow::clone_file(&base, &root).map_err(|error| chain(&error))?;
            let larger = size > file.metadata().map_err(|error| error.to_string())?.len();
            if larger {
                stasis_cow::grow_ext4(&root, size).map_err(|error| chain(&error))?;
            }
            stasis_cow::make_ext4(&folder, &app, None).map_err(|error| chain(&error))?;
            let app = std::fs::File::open(&app).map_err(|error| error.to_string())?;
            Ok(boot::Disks { root: file, app })
        })
        .await
    }
}

/// Makes frames of a memory image, in its place.
fn compress(raw: &Path, frames: &Path) -> Result<(), String> {
    let named = |error: std::io::Error| format!("{}: {error}", frames.display());
    let (image, to) = (std::fs::File::open(raw).map_err(named)?, std::fs::File::create_new(frames).map_err(named)?);
    let report = stasis_cow::write_frames(&image, &to).map_err(|error| chain(&error))?;
    tracing::info!(?report, "the memory image is compressed");
    std::fs::remove_file(raw).map_err(named)
}

/// Runs what blocks, and makes its error a failure of the platform.
async fn blocking<T, E>(work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, BuildFailure>
where
    T: Send + 'static,
    E: ToString + Send + 'static,
{
    tokio::task::spawn_blocking(work).await.map_err(platform)?.map_err(platform)
}

/// An error with its causes.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.map(ToString::to_string).fold(error.to_string(), |text, cause| match text.contains(&cause) {
        // It says so itself.
        true => text,
        false => format!("{text}: {cause}"),
    })
}

fn free_bytes(path: &Path) -> Result<u64, BuildFailure> {
    let free = |path: &Path| -> Result<u64, BuildFailure> {
        let stats = nix::sys::statvfs::statvfs(path).map_err(platform)?;
        Ok(stats.blocks_available() * stats.fragment_size())
    };
    // The data folder may be a sparse image in its parent's file system, which must have the room too.
    Ok(free(path)?.min(free(path.parent().unwrap_or(path))?))
}
