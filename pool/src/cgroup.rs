//! Control groups, version 2: one per VM, below the node's own.
//!
//! ```text
//!  OWN                       where the node was started; its controllers are handed down
//!  ├ stasis-node             the node itself, since a group that hands controllers down may hold no process (the root may)
//!  └ stasis-PID              one per node
//!    └ vm-UID                one per VM: limits, one process; removed when that has been reaped
//! ```
//!
//! What a host cannot limit is told once, at the node's start and by `stasis doctor`: VMs then run without that limit.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use stasis_vmm_api::MachineSpec;

/// The controllers of control groups version 2 that VMs' limits need.
pub const CONTROLLERS: [&str; 4] = ["memory", "cpu", "pids", "io"];

/// What a VM's process may take beside its guest's memory: itself, its page tables and buffers, KVM's structures, dirty pages of its disk.
const MEMORY_BESIDE_GUEST: u64 = 64 << 20;
/// Tasks beside the vCPUs: the event loop, and threads that KVM starts in the process's name.
const TASKS_BESIDE_VCPUS: u32 = 16;
/// Time is counted in periods of this length.
const CPU_PERIOD_US: u64 = 100_000;

/// The limits of one VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) memory: u64,
    /// Time in each period: one processor more than vCPUs, so that a guest that computes does not starve its own devices.
    pub(crate) cpu_us: u64,
    pub(crate) tasks: u32,
}

impl Limits {
    pub(crate) fn of(machine: &MachineSpec) -> Self {
        Self {
            memory: (u64::from(machine.memory_mib) << 20) + MEMORY_BESIDE_GUEST,
            cpu_us: (u64::from(machine.vcpus) + 1) * CPU_PERIOD_US,
            tasks: u32::from(machine.vcpus) + TASKS_BESIDE_VCPUS,
        }
    }
}

/// A rate on one disk, each way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskRate {
    /// As the kernel names it: `MAJOR:MINOR`.
    pub(crate) device: String,
    pub(crate) bytes_per_second: u64,
}

impl DiskRate {
    /// On the disk that holds `folder`. A partition counts as its disk, since the kernel limits whole ones.
    pub(crate) fn on(folder: &Path, bytes_per_second: u64) -> io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let device = fs::metadata(folder)?.dev();
        let device = format!("{}:{}", nix::sys::stat::major(device), nix::sys::stat::minor(device));
        let place = Path::new("/sys/dev/block").join(&device);
        if !place.exists() {
            let reason = format!("{} lies on no block device, so --vm-disk-rate cannot be kept", folder.display());
            return Err(io::Error::new(io::ErrorKind::Unsupported, reason));
        }
        let device = match place.join("partition").exists() {
            true => fs::read_to_string(place.join("../dev"))?.trim().to_owned(),
            false => device,
        };
        Ok(Self { device, bytes_per_second })
    }
}

/// The node's part of the hierarchy.
#[derive(Debug)]
pub(crate) struct Groups {
    /// Where VMs' groups are made; none where nothing can be limited.
    parent: Option<PathBuf>,
    has: Vec<&'static str>,
    disk: Option<DiskRate>,
    /// Why not all of [`CONTROLLERS`] can be used.
    lacking: Option<String>,
}

/// A VM's group, until dropped.
#[derive(Debug)]
pub(crate) struct Group {
    place: PathBuf,
    /// What it is below is of a node that is no more, and goes with the last VM in it.
    parent: Option<PathBuf>,
}

impl Groups {
    /// The node's own group, made ready for VMs. Where that fails, the reason is in [`Groups::lacking`].
    pub(crate) fn open(disk: Option<DiskRate>) -> Self {
        let opened = own_group().and_then(|own| Self::below(&own, std::process::id()));
        let (parent, has, lacking) = match opened {
            Ok((parent, has)) => {
                let rest: Vec<_> = CONTROLLERS.into_iter().filter(|wanted| !has.contains(wanted)).collect();
                let lacking =
                    (!rest.is_empty()).then(|| format!("the node's group has no controller for {}", rest.join(", ")));
                (parent, has, lacking)
            }
            Err(reason) => (None, Vec::new(), Some(reason)),
        };
        Self { parent, has, disk, lacking }
    }

    /// No limits, as on purpose.
    pub(crate) fn none() -> Self {
        Self { parent: None, has: Vec::new(), disk: None, lacking: None }
    }

    /// Takes over `own`: its controllers that limits need are handed down to a group for the VMs of the node `pid`.
    fn below(own: &Path, pid: u32) -> Result<(Option<PathBuf>, Vec<&'static str>), String> {
        let told = |path: &Path, error: io::Error| format!("{}: {error}", path.display());
        let read = |name: &str| fs::read_to_string(own.join(name)).map_err(|error| told(&own.join(name), error));
        let controllers = read("cgroup.controllers")?;
        let has: Vec<_> =
            CONTROLLERS.into_iter().filter(|wanted| controllers.split_whitespace().any(|has| has == *wanted)).collect();
        if has.is_empty() {
            return Ok((None, has));
        }
        // Only the root has no type, and only the root may hold processes beside groups with controllers.
        if own.join("cgroup.type").exists() {
            let others = read("cgroup.procs")?.lines().filter(|line| *line != pid.to_string()).count();
            if others > 0 {
                return Err(format!(
                    "{} holds {others} other processes: start the node in a group of its own, as by \
                     `systemd-run --scope -p Delegate=yes stasis up …`",
                    own.display()
                ));
            }
            let node = own.join("stasis-node");
            make_folder(&node).map_err(|error| told(&node, error))?;
            fs::write(node.join("cgroup.procs"), pid.to_string()).map_err(|error| told(&node, error))?;
        }
        sweep(own);
        let parent = own.join(format!("stasis-{pid}"));
        make_folder(&parent).map_err(|error| told(&parent, error))?;
        for place in [own, &parent] {
            let control = place.join("cgroup.subtree_control");
            let down: Vec<_> = has.iter().map(|controller| format!("+{controller}")).collect();
            fs::write(&control, down.join(" ")).map_err(|error| told(&control, error))?;
        }
        Ok((Some(parent), has))
    }

    /// Which limits cannot be set, and why.
    pub(crate) fn lacking(&self) -> Option<&str> {
        self.lacking.as_deref()
    }

    /// A group with limits for the VM that runs as `uid`; none where nothing can be limited.
    pub(crate) fn make(&self, uid: u32, limits: &Limits) -> io::Result<Option<Group>> {
        let Some(parent) = &self.parent else { return Ok(None) };
        let group = Group { place: parent.join(format!("vm-{uid}")), parent: None };
        make_folder(&group.place)?;
        let Limits { memory, cpu_us, tasks } = limits;
        for controller in &self.has {
            match *controller {
                "memory" => {
                    group.set("memory.max", &memory.to_string())?;
                    // Half a VM is of no use to anybody.
                    group.set("memory.oom.group", "1")?;
                }
                "cpu" => group.set("cpu.max", &format!("{cpu_us} {CPU_PERIOD_US}"))?,
                "pids" => group.set("pids.max", &tasks.to_string())?,
                "io" => {
                    if let Some(DiskRate { device, bytes_per_second: rate }) = &self.disk {
                        group.set("io.max", &format!("{device} rbps={rate} wbps={rate}"))?;
                    }
                }
                _ => {}
            }
        }
        Ok(Some(group))
    }

    /// The group of a VM that another node has started.
    pub(crate) fn adopt(&self, place: &Path) -> Group {
        let parent = place.parent().filter(|parent| Some(*parent) != self.parent.as_deref());
        Group { place: place.to_owned(), parent: parent.map(Path::to_owned) }
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        // One with VMs that go on without this node goes with the last of them.
        if let Some(parent) = &self.parent
            && let Err(error) = fs::remove_dir(parent)
            && !matches!(error.kind(), io::ErrorKind::ResourceBusy | io::ErrorKind::DirectoryNotEmpty)
        {
            tracing::warn!(group = %parent.display(), %error, "a control group cannot be removed");
        }
    }
}

impl Group {
    fn set(&self, name: &str, value: &str) -> io::Result<()> {
        let path = self.place.join(name);
        fs::write(&path, value)
            .map_err(|error| io::Error::new(error.kind(), format!("{} = {value}: {error}", path.display())))
    }

    /// The file that a process id is written to.
    pub(crate) fn procs(&self) -> PathBuf {
        self.place.join("cgroup.procs")
    }

    pub(crate) fn place(&self) -> &Path {
        &self.place
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.place) {
            tracing::warn!(group = %self.place.display(), %error, "a VM's control group cannot be removed");
        }
        if let Some(parent) = &self.parent {
            sweep_node(parent);
        }
    }
}

fn make_folder(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// Removes the control groups that killed nodes of this process's own group left.
pub fn sweep_groups() {
    if let Ok(own) = own_group() {
        sweep(&own);
    }
}

/// What killed nodes left. A group with processes cannot be removed, so none that is in use is.
fn sweep(own: &Path) {
    for entry in fs::read_dir(own).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.strip_prefix("stasis-")?.parse::<u32>().ok()) else {
            continue;
        };
        if !Path::new("/proc").join(pid.to_string()).exists() {
            sweep_node(&entry.path());
        }
    }
}

/// Removes what is empty of a killed node's groups.
fn sweep_node(place: &Path) {
    for vm in fs::read_dir(place).into_iter().flatten().flatten() {
        // Files of the kernel's are in the way of nothing, and not ours.
        let _ = fs::remove_dir(vm.path());
    }
    // A process may still be in it: whoever sees its end, or the next start, tries again.
    let _ = fs::remove_dir(place);
}

/// This process's group in the version 2 hierarchy.
fn own_group() -> Result<PathBuf, String> {
    let read = |path: &str| fs::read_to_string(path).map_err(|error| format!("{path}: {error}"));
    let mounts = read("/proc/self/mounts")?;
    let place =
        mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|fields| fields.get(2) == Some(&"cgroup2"));
    let place = place.and_then(|fields| fields.get(1).map(PathBuf::from)).ok_or("no cgroup2 is mounted")?;
    let groups = read("/proc/self/cgroup")?;
    let own = groups
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .ok_or("/proc/self/cgroup has no line for version 2")?;
    Ok(place.join(own.trim_start_matches('/')))
}

#[cfg(test)]
mod tests;
