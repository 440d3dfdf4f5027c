//! The node, as a gateway sees it.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::Duration,
};

use futures_util::future::{BoxFuture, FutureExt};
use stasis_pool_api::{
    Archive, BuildEvent, BuildEvents, BuildFailure, BuildOptions, Capacity, Claim, ClaimError, Node, PoolPatch,
    PoolStatus, RemoveError, Sandboxes, SetPoolError, TemplateInfo, TemplateName, Tenant,
};
use stasis_state::SqliteStore;
use tokio::sync::{Mutex, mpsc};

use crate::{
    admission::Admission,
    build::{ImportedBase, Progress, Workshop, chain},
    cgroup::{DiskRate, Groups},
    config::{Jail, NodeConfig},
    metrics,
    pager::forget_working_set,
    pool::{Shared, Turns},
    pools::{OverridesError, Pools},
    restore::FromSnapshot,
    session::{FromPools, LocalSandboxes, Measured, Survivors, VMS},
    template::{self, Template},
    vmm::Spawner,
};

/// Folders of the data directory.
const TEMPLATES: &str = "templates";
const BASES: &str = "bases";
/// What hibernated sandboxes are brought back from, and the records of all.
const SANDBOXES: &str = "sandboxes";
pub(crate) const RECORDS: &str = "sandboxes.sqlite";
/// What was set of pools.
const SETTINGS: &str = "pools.json";
pub(crate) const UPLOADS: &str = "uploads";

/// Events of a build that may wait for a slow reader.
const EVENTS: usize = 16;

/// Why a node cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A file of the configuration cannot be read.
    #[error("{what} {path:?} cannot be read: {reason}; `make up` builds it, or name another with the flag")]
    Asset {
        /// What it is.
        what: &'static str,
        /// Where it should be.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The data folder cannot be used.
    #[error("the data folder cannot be used: {0}")]
    Data(String),
    /// The records of sandboxes cannot be used.
    #[error("the records of sandboxes cannot be used: {0}")]
    Records(#[from] stasis_state::OpenError),
    /// What was set of pools cannot be read.
    #[error("{0}")]
    Settings(String),
    /// VMM processes cannot be jailed on this host.
    #[error("VMM processes cannot be jailed: {0}; stasis up needs all of root's capabilities, see `stasis doctor`")]
    Jail(String),
}

impl From<io::Error> for StartError {
    fn from(error: io::Error) -> Self {
        Self::Data(error.to_string())
    }
}

impl From<OverridesError> for StartError {
    fn from(error: OverridesError) -> Self {
        Self::Settings(error.to_string())
    }
}

/// The node of this process.
#[derive(Debug)]
pub struct LocalNode {
    workshop: Arc<Workshop>,
    pools: Arc<Pools>,
    sandboxes: Arc<LocalSandboxes>,
    /// One build at a time: each needs a core and boots for seconds.
    building: Arc<Mutex<()>>,
}

impl LocalNode {
    /// Takes over a data folder: removes what a killed node left half done, imports the bases, verifies all templates and starts
    /// their pools; then its sandboxes, and their VMs that live. Blocks for as long as hashing takes.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start(config: &NodeConfig) -> Result<Self, StartError> {
        metrics::describe();
        let templates = config.data.join(TEMPLATES);
        let bases = config.data.join(BASES);
        let uploads = config.data.join(UPLOADS);
        let sandboxes = config.data.join(SANDBOXES);
        match fs::remove_dir_all(&uploads) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let vms = config.data.join(VMS);
        for folder in [&templates, &bases, &uploads, &sandboxes] {
            fs::create_dir_all(folder)?;
        }
        // Whoever can come to a socket in there has the VM.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&vms)?;
        let spawner = spawner(config)?;
        let (outgrown, to_build_again) = mpsc::unbounded_channel();
        let admission = Admission::with(config.memory.as_u64(), config.cores);
        // Before a pool starts its first VM.
        let survivors = Survivors::find(&vms, &spawner, &admission)?;
        let shared = Arc::new(Shared {
            source: Box::new(FromSnapshot { spawner: spawner.clone(), admission: admission.clone() }),
            admission,
            restores: Turns::shown_as("starts", config.restores_at_once),
            wakes: Turns::shown_as("repairs", config.repairs_at_once),
            warmings: Turns::new(config.repairs_at_once / 2),
            outgrown,
        });
        let workshop = Workshop {
            shared: Arc::clone(&shared),
            spawner: spawner.clone(),
            templates: templates.clone(),
            data: config.data.clone(),
            kernel: config.kernel.clone(),
            initrd: config.initrd.clone(),
            variant: config.variant,
            kernel_digest: kernel_digest(config)?,
            bases: config.bases.iter().map(|base| import(&base.name, &base.image, &bases)).collect::<Result<_, _>>()?,
        };
        remove_other_bases(&bases, &workshop.bases)?;
        let pools = Pools::new(Arc::clone(&shared), config.standing_tenant.clone(), config.data.join(SETTINGS))?;
        let pools = Arc::new(pools);
        for (name, loaded) in template::load_all(&templates)? {
            match loaded {
                Ok(template) => publish(&pools, template),
                Err(error) => {
                    let reason = chain(&error);
                    tracing::error!(template = %name, reason, "a template is refused; build it again");
                    pools.refuse(name, reason);
                }
            }
        }
        let machines = FromPools {
            pools: Arc::clone(&pools),
            shared: Arc::clone(&shared),
            spawner,
            folder: sandboxes.clone(),
            open: std::sync::Mutex::default(),
            survivors,
        };
        let store = Arc::new(Measured(SqliteStore::open(&config.data.join(RECORDS))?));
        let versions = Arc::clone(&pools);
        let version = move |name: &TemplateName| versions.template(name).map(|template| template.info().digest.clone());
        let sandboxes = LocalSandboxes::start(Arc::new(machines), store, version, Some(&sandboxes)).await?;
        let sandboxes = Arc::new(sandboxes);
        tokio::spawn(spare(shared.admission.shortages(), Arc::clone(&sandboxes)));
        let node = Self { workshop: Arc::new(workshop), pools, sandboxes, building: Arc::default() };
        let (workshop, building) = (Arc::downgrade(&node.workshop), Arc::clone(&node.building));
        tokio::spawn(build_again(to_build_again, workshop, Arc::clone(&node.pools), building));
        Ok(node)
    }

    /// Brings sandboxes to disk, but those that cannot be brought there: they stay as they are.
    pub async fn save(&self) {
        self.sandboxes.save().await;
    }

    /// Lets sandboxes' VMs go on as they are, for the next node, and ends all others: waits until those have ended. How many go on.
    pub async fn leave(&self) -> usize {
        let left = self.sandboxes.leave().await;
        self.pools.drain();
        self.pools.shared().admission.all_returned().await;
        left
    }
}

/// Whenever memory or vCPUs are short, the sandbox that has been suspended longest gives up its own.
pub(crate) async fn spare(mut shortages: tokio::sync::watch::Receiver<()>, sandboxes: Arc<LocalSandboxes>) {
    while shortages.changed().await.is_ok() {
        sandboxes.spare_one();
    }
}

/// Puts a template into service, and removes the version that it replaces.
fn publish(pools: &Pools, template: Template) {
    let place = template.folder().to_owned();
    let Some(old) = pools.publish(template) else { return };
    if old.folder() == place {
        return; // rebuilt in place, because it had been damaged
    }
    // Its VMs hold open what they need.
    let old = old.folder();
    if let Err(error) = forget_working_set(old).and_then(|()| fs::remove_dir_all(old)) {
        tracing::warn!(folder = %old.display(), %error, "an old version could not be removed");
    }
}

/// Builds templates again that were made for another kind of host, as long as there is a node.
async fn build_again(
    mut outgrown: mpsc::UnboundedReceiver<Arc<Template>>,
    workshop: Weak<Workshop>,
    pools: Arc<Pools>,
    building: Arc<Mutex<()>>,
) {
    while let (Some(template), Some(workshop)) = (outgrown.recv().await, workshop.upgrade()) {
        let name = template.info().spec.name.clone();
        let _turn = building.lock().await;
        if !pools.serves(&template) {
            continue; // replaced or removed meanwhile
        }
        tracing::info!(template = %name, "a template of another kind of host is built again");
        let job = workshop.again(Arc::clone(&template));
        let built = match workshop.admit(&job).await {
            Ok(reservation) => workshop.build(&job, reservation, &Progress::untold(&job)).await,
            Err(failure) => Err(failure),
        };
        match built {
            Ok(built) if pools.serves(&template) => {
                publish(&pools, built);
                tracing::info!(template = %name, "a template of another kind of host was built again");
            }
            Ok(built) => {
                // Replaced or removed meanwhile: what replaced it is newer.
                if let Err(error) = fs::remove_dir_all(built.folder()) {
                    tracing::warn!(folder = %built.folder().display(), %error, "a version that came too late could not be removed");
                }
            }
            Err(failure) => {
                tracing::error!(template = %name, %failure, "a template of another kind of host cannot be built again; build it by hand");
            }
        }
    }
}

/// What VMM processes come from, and a word on what this host cannot limit.
fn spawner(config: &NodeConfig) -> Result<Spawner, StartError> {
    let Jail { uid_base, disk_rate, environment } = &config.jail;
    let disk = match disk_rate {
        Some(rate) => Some(DiskRate::on(&config.data, rate.as_u64())?),
        None => None,
    };
    let groups = Groups::open(disk);
    if let Some(reason) = groups.lacking() {
        tracing::warn!(reason, "VMs run without some of the limits of control groups; see `stasis doctor`");
    }
    Spawner::start(&config.vmm, environment.clone(), *uid_base, groups)
        .map_err(|error| StartError::Jail(error.to_string()))
}

fn digest_of(what: &'static str, path: &Path) -> Result<String, StartError> {
    File::open(path)
        .and_then(|file| stasis_cow::digest_file(&file))
        .map(|digest| digest.to_string())
        .map_err(|error| StartError::Asset { what, path: path.into(), reason: error.to_string() })
}

/// Of the kernel, and of its initial RAM disk.
fn kernel_digest(config: &NodeConfig) -> Result<String, StartError> {
    let mut digest = digest_of("the guest kernel", &config.kernel)?;
    if let Some(initrd) = &config.initrd {
        digest.push_str(&digest_of("the guest kernel's initial RAM disk", initrd)?);
    }
    Ok(digest)
}

/// Brings a base into the data folder, where it can be cloned. A base is known by its content.
fn import(name: &str, image: &Path, bases: &Path) -> Result<ImportedBase, StartError> {
    let digest = digest_of("the base image", image)?;
    let place = bases.join(format!("{}.ext4", digest.get(..16).unwrap_or(&digest)));
    if !place.exists() {
        tracing::info!(base = name, image = %image.display(), "importing a base image");
        stasis_cow::import(image, &place, &mut |_, _| {}).map_err(|error| StartError::Data(chain(&error)))?;
    }
    Ok(ImportedBase { name: name.to_owned(), image: place, digest })
}

/// Images of bases that are no longer configured. Templates and VMs have clones of their own.
fn remove_other_bases(folder: &Path, bases: &[ImportedBase]) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if !bases.iter().any(|base| base.image == path) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

impl Node for LocalNode {
    fn claim<'a>(
        &'a self,
        tenant: &'a Tenant,
        name: &'a TemplateName,
        budget: Duration,
    ) -> BoxFuture<'a, Result<Claim, ClaimError>> {
        async move { self.pools.take(tenant, name, budget).await.map(Claim::from) }.boxed()
    }

    fn templates(&self) -> Vec<TemplateInfo> {
        self.pools.infos()
    }

    fn template(&self, name: &TemplateName) -> Option<TemplateInfo> {
        self.pools.template(name).map(|template| template.info().clone())
    }

    fn knows(&self, name: &TemplateName) -> bool {
        self.pools.knows(name)
    }

    fn build(&self, archive: Archive, options: BuildOptions) -> BoxFuture<'_, Result<BuildEvents, BuildFailure>> {
        async move {
            let job = self.workshop.accept(archive, options.clock_ns).await?;
            let (sender, events) = mpsc::channel(EVENTS);
            let progress = Progress::new(sender, &job);
            let known = self.pools.template(&job.spec.name);
            let known = known.filter(|template| template.info().digest == job.digest && template.is_intact());
            if let Some(known) = known {
                let known = known.info().clone();
                progress.end(BuildEvent::Built { template: Box::new(known), unchanged: true }).await;
                return Ok(events);
            }
            let reservation = self.workshop.admit(&job).await?;
            let (workshop, building) = (Arc::clone(&self.workshop), Arc::clone(&self.building));
            let pools = Arc::clone(&self.pools);
            tokio::spawn(async move {
                let _turn = building.lock().await;
                let event = match workshop.build(&job, reservation, &progress).await {
                    Ok(template) => {
                        let info = Box::new(template.info().clone());
                        publish(&pools, template);
                        BuildEvent::Built { template: info, unchanged: false }
                    }
                    Err(failure) => {
                        tracing::warn!(template = %job.spec.name, %failure, "a template build failed");
                        BuildEvent::Failed(failure)
                    }
                };
                drop(job);
                progress.end(event).await;
            });
            Ok(events)
        }
        .boxed()
    }

    fn remove<'a>(&'a self, name: &'a TemplateName) -> BoxFuture<'a, Result<(), RemoveError>> {
        async move {
            if !self.pools.remove(name) {
                return Err(RemoveError::Unknown(name.clone()));
            }
            let folder = self.workshop.templates.join(name.as_str());
            let removed =
                tokio::task::spawn_blocking(move || fs::remove_dir_all(folder)).await.map_err(io::Error::other);
            removed
                .and_then(|result| result)
                .map_err(|error| RemoveError::Files { name: name.clone(), reason: error.to_string() })
        }
        .boxed()
    }

    fn sandboxes(&self, tenant: &Tenant) -> Arc<dyn Sandboxes> {
        Arc::new(self.sandboxes.of(tenant))
    }

    fn capacity(&self) -> Capacity {
        let shared = self.pools.shared();
        let (memory, vcpus) = shared.admission.capacity();
        let (starts, repairs) = (shared.restores.state(), shared.wakes.state());
        let retry_after = Admission::retry_rule();
        Capacity { memory, vcpus, starts, repairs, retry_after, templates: self.pools.costs() }
    }

    fn pools<'a>(&'a self, tenant: &'a Tenant) -> BoxFuture<'a, Vec<PoolStatus>> {
        self.pools.statuses(tenant).boxed()
    }

    fn pool<'a>(&'a self, tenant: &'a Tenant, name: &'a TemplateName) -> BoxFuture<'a, Option<PoolStatus>> {
        self.pools.status(tenant, name).boxed()
    }

    fn set_pool<'a>(
        &'a self,
        tenant: &'a Tenant,
        name: &'a TemplateName,
        patch: PoolPatch,
    ) -> BoxFuture<'a, Result<PoolStatus, SetPoolError>> {
        async move {
            let (pools, of, called) = (Arc::clone(&self.pools), tenant.clone(), name.clone());
            let set = tokio::task::spawn_blocking(move || pools.set(&of, &called, &patch)).await;
            set.map_err(|error| SetPoolError::Store(error.to_string()))??;
            let unknown = || SetPoolError::UnknownTemplate(name.clone());
            self.pools.status(tenant, name).await.ok_or_else(unknown)
        }
        .boxed()
    }
}
