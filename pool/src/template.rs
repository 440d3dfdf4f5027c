//! A published template: verified once, held open, checked again at every use.

use std::{
    fs::{self, File},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use stasis_cow::{Snapshot, SnapshotError};
use stasis_pool_api::{DevicesSpec, MemoryForm, TemplateCost, TemplateInfo, TemplateName, TemplateSpec};
use stasis_vmm_api::{Disk, MachineSpec};

use crate::{
    admission::{Admission, Charge, Dirty},
    pager::{Pager, forget_working_set, working_set_of},
    restore::RestoreError,
    vmm::Spawner,
};

/// Parts of a template's snapshot.
pub(crate) mod part {
    pub(crate) const MEMORY: &str = "memory";
    /// Instead of [`MEMORY`], where it is compressed.
    pub(crate) const FRAMES: &str = "memory.frames";
    pub(crate) const STATE: &str = "state";
    pub(crate) const DISK: &str = "disk";
    pub(crate) const APP: &str = "app";
}

/// The disks of every VM: the root file system, and the template's folder at `/app`.
pub(crate) const DISKS: [Disk; 2] = [Disk { read_only: false, rate: None }, Disk { read_only: true, rate: None }];

/// Why a template cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TemplateError {
    /// It is damaged, or not one of ours.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// Its manifest lacks what this version needs.
    #[error("the manifest's details are not understood: {0}")]
    Details(#[from] serde_json::Error),
    /// A file of it cannot be used.
    #[error("a part of the template cannot be used: {0}")]
    Io(#[from] io::Error),
    /// Its disk cannot be cloned.
    #[error(transparent)]
    Clone(#[from] stasis_cow::CloneError),
}

/// A template.
#[derive(Debug)]
pub(crate) struct Template {
    info: TemplateInfo,
    snapshot: Snapshot,
    /// Fills the memory of its VMs, if that is compressed: started by the first restore, and again by the first after its end.
    pager: tokio::sync::Mutex<Option<Arc<Pager>>>,
    /// What lives of its VMs have written.
    dirty: Dirty,
    /// Its guests wait for their first order at a page of their memory, for all that is known.
    has_wake_page: AtomicBool,
}

/// The files that a restore needs: the state for [`stasis_vmm_api::Request::Prepare`], the others for [`stasis_vmm_api::Request::Restore`].
pub(crate) struct RestoreFiles {
    pub(crate) image: OwnedFd,
    pub(crate) state: OwnedFd,
    /// The root disk: a clone of its own.
    pub(crate) root: File,
    pub(crate) app: OwnedFd,
}

impl Template {
    /// Opens and verifies a published folder.
    pub(crate) fn open(folder: &Path) -> Result<Self, TemplateError> {
        let snapshot = Snapshot::open(folder)?;
        let info: TemplateInfo = serde_json::from_value(snapshot.manifest().details.clone())?;
        for name in parts(&info.spec) {
            snapshot.part(name)?;
        }
        Ok(Self {
            info,
            snapshot,
            pager: tokio::sync::Mutex::default(),
            dirty: Dirty::default(),
            has_wake_page: AtomicBool::new(true),
        })
    }

    pub(crate) fn info(&self) -> &TemplateInfo {
        &self.info
    }

    /// What lives of its VMs have written.
    pub(crate) fn dirty(&self) -> &Dirty {
        &self.dirty
    }

    /// Whether to leave a VM's first order in its wake page; only its VMM can tell that it has none.
    pub(crate) fn has_wake_page(&self) -> bool {
        self.has_wake_page.load(Relaxed)
    }

    /// It has none.
    pub(crate) fn has_no_wake_page(&self) {
        self.has_wake_page.store(false, Relaxed);
    }

    /// What a VM of it counts with that stands ready.
    pub(crate) fn paused_charge(&self) -> Charge {
        Charge::paused(&self.info, self.dirty.measured().1)
    }

    /// What its VMs count with.
    pub(crate) fn cost(&self) -> TemplateCost {
        let (lives, dirty_p99) = self.dirty.measured();
        let (running, paused) = (Charge::running(&self.info), Charge::paused(&self.info, dirty_p99));
        TemplateCost {
            template: self.info.spec.name.clone(),
            running: running.own_bytes(),
            paused: paused.own_bytes(),
            image: running.image_bytes(),
            lives: lives as u64,
            dirty_p99,
        }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.snapshot.folder()
    }

    /// Nothing was written to it since it was verified.
    pub(crate) fn is_intact(&self) -> bool {
        parts(&self.info.spec).into_iter().all(|name| self.snapshot.part(name).is_ok())
    }

    /// A part's file, open for reading.
    pub(crate) fn part(&self, name: &str) -> Result<&File, TemplateError> {
        Ok(self.snapshot.part(name)?)
    }

    /// The machine of its VMs.
    pub(crate) fn machine(&self) -> MachineSpec {
        let paged = self.info.spec.snapshot.memory == MemoryForm::Compressed;
        MachineSpec { paged, ..machine(&self.info.spec) }
    }

    /// The pager of its VMs, which it has if its memory is compressed: `image`.
    pub(crate) async fn pager(
        &self,
        spawner: &Spawner,
        admission: &Admission,
        image: OwnedFd,
    ) -> Result<Arc<Pager>, RestoreError> {
        let mut pager = self.pager.lock().await;
        if let Some(pager) = pager.as_ref().filter(|pager| pager.is_alive()) {
            return Ok(Arc::clone(pager));
        }
        let reservation = admission.reserve(self.info.spec.memory_mib())?;
        let set = working_set_of(self.folder());
        let started = Pager::start(spawner, &self.machine(), image, &set, reservation).await?;
        Ok(Arc::clone(pager.insert(Arc::new(started))))
    }

    /// Opens what a restore needs; the root disk is a clone of its own, nameless, so that it is gone with its VM.
    pub(crate) fn restore_files(&self) -> Result<RestoreFiles, TemplateError> {
        let shared = |name| -> Result<OwnedFd, TemplateError> { Ok(self.snapshot.part(name)?.try_clone()?.into()) };
        let disk = stasis_cow::clone_nameless(self.snapshot.part(part::DISK)?, self.folder())?;
        Ok(RestoreFiles {
            image: shared(memory_part(&self.info.spec))?,
            // The state is read from its start: a descriptor of its own, since a duplicate shares the position.
            state: reopen(self.snapshot.part(part::STATE)?)?,
            root: disk,
            app: shared(part::APP)?,
        })
    }

    /// A part that VMs share, open for reading.
    pub(crate) fn share(&self, name: &str) -> Result<File, TemplateError> {
        Ok(self.snapshot.part(name)?.try_clone()?)
    }

    /// Makes a VM's root disk the template's again. A rewind must be refused where a restore would be: what it brings back is the parts' contents
    /// of now.
    pub(crate) fn reset_disk(&self, disk: &File) -> Result<(), TemplateError> {
        for name in parts(&self.info.spec) {
            self.snapshot.part(name)?;
        }
        Ok(stasis_cow::reset_clone(disk, self.snapshot.part(part::DISK)?)?)
    }
}

fn memory_part(spec: &TemplateSpec) -> &'static str {
    match spec.snapshot.memory {
        MemoryForm::Raw => part::MEMORY,
        MemoryForm::Compressed => part::FRAMES,
    }
}

fn parts(spec: &TemplateSpec) -> [&'static str; 4] {
    [memory_part(spec), part::STATE, part::DISK, part::APP]
}

/// The machine that a specification asks for.
pub(crate) fn machine(spec: &TemplateSpec) -> MachineSpec {
    let DevicesSpec { rng, balloon } = spec.devices;
    let (memory_mib, vcpus, disks) = (spec.memory_mib(), spec.cpu, DISKS.to_vec());
    MachineSpec { memory_mib, vcpus, disks, rng, balloon, ..MachineSpec::default() }
}

pub(crate) fn reopen(file: &File) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    Ok(File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?.into())
}

/// All templates of a folder, and those that are refused, by name. Where a crash left two versions of one, the newer one stays.
pub(crate) fn load_all(root: &Path) -> io::Result<Vec<(TemplateName, Result<Template, TemplateError>)>> {
    let mut found = Vec::new();
    for entry in sorted_folders(root)? {
        let Some(name) = entry.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok()) else {
            continue;
        };
        stasis_cow::sweep(&entry).map_err(io::Error::other)?;
        let mut versions: Vec<_> = sorted_folders(&entry)?.iter().map(|folder| Template::open(folder)).collect();
        for refused in versions.iter().filter_map(|version| version.as_ref().err()) {
            tracing::error!(template = %name, reason = %refused, "a version of this template is refused");
        }
        versions.sort_by_key(|version| version.as_ref().map_or(0, |template| template.info.created_at));
        if let Some(newest) = versions.pop() {
            for old in versions.into_iter().flatten() {
                forget_working_set(old.folder())?;
                fs::remove_dir_all(old.folder())?;
            }
            found.push((name, newest));
        }
    }
    Ok(found)
}

fn sorted_folders(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut folders: Vec<_> = fs::read_dir(root)?
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .filter(|path| path.is_dir() && !path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".")))
        .collect();
    folders.sort();
    Ok(folders)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// What is known of a template that nobody has built, of which fakes can be restored.
    pub(crate) fn info(spec: &str) -> TemplateInfo {
        TemplateInfo {
            spec: TemplateSpec::parse(spec).unwrap(),
            digest: "d".into(),
            created_at: 1,
            kernel_boot_id: "template's boot".into(),
            build_ms: 0,
            null_request_us: 0,
            memory_bytes: 0,
            made_with: stasis_pool_api::MadeWith::default(),
        }
    }

    /// A template whose parts hold nothing: enough for a pool whose VMs are fakes.
    pub(crate) fn hollow(root: &Path, spec: &str) -> Template {
        let staging = stasis_cow::Staging::new(root).unwrap();
        for name in [part::MEMORY, part::STATE, part::DISK, part::APP] {
            fs::write(staging.path(name), name).unwrap();
        }
        let info = info(spec);
        let place = root.join(uuid::Uuid::new_v4().simple().to_string());
        staging.publish(&place, serde_json::to_value(&info).unwrap(), 1).unwrap();
        Template::open(&place).unwrap()
    }

    #[test]
    fn what_was_published_is_loaded_and_damage_is_named() {
        let root = tempfile::tempdir().unwrap();
        let home = root.path().join("x");
        fs::create_dir(&home).unwrap();
        let template = hollow(&home, "name='x'\ncommand='y'");
        let (name, loaded) = load_all(root.path()).unwrap().remove(0);
        assert_eq!((name.as_str(), loaded.unwrap().info()), ("x", template.info()));

        let memory = template.folder().join(part::MEMORY);
        fs::remove_file(&memory).unwrap();
        fs::write(&memory, "memorz").unwrap();
        let (_, loaded) = load_all(root.path()).unwrap().remove(0);
        assert!(matches!(loaded, Err(TemplateError::Snapshot(SnapshotError::Altered { .. }))));
    }
}
