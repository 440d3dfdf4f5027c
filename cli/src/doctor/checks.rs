//! The checks. Each looks at the thing itself, not at what should be there.

use std::{
    fs::{self, File},
    path::Path,
};

use bytesize::ByteSize;
use stasis_pool::{CONTROLLERS, Jail, KernelVariant};

use super::{Finding, JAIL_UID_BASE, Verdict, available_memory, kernel_variant, open_kvm};

/// Less memory than this holds no template and its pool.
const LEAST_MEMORY: u64 = 1 << 30;
/// Less disk than this holds no base image and templates.
const LEAST_DISK: u64 = 6 << 30;

pub(super) fn all(data: &Path) -> Vec<Finding> {
    vec![
        root(),
        kvm(),
        kernel(),
        jail(),
        cgroups(),
        disk_format(data),
        disk_space(data),
        memory(),
        tap(),
        bpf(),
        userfaultfd(),
    ]
}

fn finding(name: &'static str, verdict: Verdict, found: impl Into<String>, remedy: Option<&'static str>) -> Finding {
    Finding { name, verdict, found: found.into(), remedy }
}

fn root() -> Finding {
    if rustix::process::geteuid().is_root() {
        finding("user", Verdict::Ok, "root", None)
    } else {
        finding("user", Verdict::Missing, "not root", Some("run stasis up with sudo"))
    }
}

fn kvm() -> Finding {
    match open_kvm().and_then(|file| Ok(stasis_vmm::kvm_version(file)?)) {
        Ok(version) => finding("kvm", Verdict::Ok, format!("API version {version}"), None),
        Err(error) => finding(
            "kvm",
            Verdict::Missing,
            format!("{error:#}"),
            Some("enable (nested) virtualisation and load the kvm modules"),
        ),
    }
}

fn kernel() -> Finding {
    match kernel_variant() {
        Ok(KernelVariant::Hw) => finding("guest kernel", Verdict::Ok, "hw: this CPU has VMX or SVM", None),
        Ok(KernelVariant::Emulated) => finding(
            "guest kernel",
            Verdict::Limited,
            "emulated: no VMX or SVM, so KVM interprets guest kernel code, some 300 times slower",
            Some("for speed, use a host with VMX or SVM; guest user code runs natively here too"),
        ),
        Err(error) => finding("guest kernel", Verdict::Missing, format!("{error:#}"), Some("mount /proc")),
    }
}

/// Puts a process into it: whatever is lacking shows.
fn jail() -> Finding {
    let jail = Jail { uid_base: JAIL_UID_BASE, disk_rate: None, environment: Vec::new() };
    let tried = std::env::current_exe().map_err(|error| error.to_string()).and_then(|program| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.map_err(|error| error.to_string())?.block_on(stasis_pool::try_jail(&program, &jail))
    });
    match tried {
        Ok(()) => {
            finding("jail", Verdict::Ok, "a VMM process entered it: namespaces, no root, no privileges, seccomp", None)
        }
        Err(reason) => finding(
            "jail",
            Verdict::Missing,
            reason,
            Some("run as root with all capabilities, on a kernel with namespaces and CONFIG_SECCOMP_FILTER"),
        ),
    }
}

fn cgroups() -> Finding {
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    let place =
        mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|fields| fields.get(2) == Some(&"cgroup2"));
    let Some(place) = place.and_then(|fields| fields.get(1).map(|place| (*place).to_owned())) else {
        return finding("cgroup v2", Verdict::Limited, "not mounted", Some("mount -t cgroup2 none /sys/fs/cgroup"));
    };
    let controllers = fs::read_to_string(Path::new(&place).join("cgroup.controllers")).unwrap_or_default();
    let lacking: Vec<_> =
        CONTROLLERS.into_iter().filter(|wanted| !controllers.split_whitespace().any(|has| has == *wanted)).collect();
    if lacking.is_empty() {
        finding("cgroup v2", Verdict::Ok, format!("{place}: {}", controllers.trim()), None)
    } else {
        finding(
            "cgroup v2",
            Verdict::Limited,
            format!("{place} lacks {}: VMs run without these limits", lacking.join(", ")),
            Some("boot with cgroup_no_v1=all"),
        )
    }
}

fn disk_format(data: &Path) -> Finding {
    let place = existing(data);
    match stasis_cow::supports_reflink(place) {
        Ok(true) => finding("reflink", Verdict::Ok, format!("{} has it", place.display()), None),
        _ if Path::new("/dev/loop-control").exists() => finding(
            "reflink",
            Verdict::Ok,
            format!("{} has none; stasis up mounts an XFS image of its own on a loop device", place.display()),
            None,
        ),
        _ => finding(
            "reflink",
            Verdict::Missing,
            "no reflink and no loop devices",
            Some("put --data on XFS or btrfs, or load the loop module"),
        ),
    }
}

fn disk_space(data: &Path) -> Finding {
    let place = existing(data);
    match rustix::fs::statvfs(place) {
        Ok(stats) => {
            let free = stats.f_bavail * stats.f_frsize;
            let enough = free >= LEAST_DISK;
            let verdict = if enough { Verdict::Ok } else { Verdict::Missing };
            let remedy = (!enough).then_some("free at least 6 GiB, or put --data elsewhere");
            finding("disk", verdict, format!("{} free at {}", ByteSize::b(free), place.display()), remedy)
        }
        Err(error) => {
            finding("disk", Verdict::Missing, error.to_string(), Some("name a directory that exists with --data"))
        }
    }
}

fn memory() -> Finding {
    match available_memory() {
        Ok(free) if free >= LEAST_MEMORY => {
            finding("memory", Verdict::Ok, format!("{} available", ByteSize::b(free)), None)
        }
        Ok(free) => {
            finding("memory", Verdict::Missing, format!("{} available", ByteSize::b(free)), Some("free at least 1 GiB"))
        }
        Err(error) => finding("memory", Verdict::Missing, format!("{error:#}"), Some("mount /proc")),
    }
}

fn tap() -> Finding {
    match File::options().read(true).write(true).open("/dev/net/tun") {
        Ok(_) => finding("tap", Verdict::Ok, "/dev/net/tun opens", None),
        Err(error) => finding(
            "tap",
            Verdict::Limited,
            format!("/dev/net/tun: {error}"),
            Some("load the tun module; needed for egress only"),
        ),
    }
}

fn bpf() -> Finding {
    if Path::new("/sys/kernel/btf/vmlinux").exists() {
        finding("bpf", Verdict::Ok, "the kernel has BTF", None)
    } else {
        finding(
            "bpf",
            Verdict::Limited,
            "no /sys/kernel/btf/vmlinux",
            Some("use a kernel with CONFIG_DEBUG_INFO_BTF; needed for egress policy only"),
        )
    }
}

fn userfaultfd() -> Finding {
    match File::options().read(true).write(true).open("/dev/userfaultfd") {
        Ok(_) => finding("userfaultfd", Verdict::Ok, "/dev/userfaultfd opens", None),
        Err(error) => finding(
            "userfaultfd",
            Verdict::Limited,
            format!("/dev/userfaultfd: {error}"),
            Some("use a kernel with CONFIG_USERFAULTFD; needed for compressed and remote images only"),
        ),
    }
}

/// The nearest folder that exists.
fn existing(path: &Path) -> &Path {
    path.ancestors().find(|place| place.is_dir()).unwrap_or(Path::new("."))
}
