//! What only the host can tell: its processors, and the memory of its microVMs.

use std::{fmt, fs, io};

/// Which of the two guest kernels this host runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestKernel {
    /// For processors that virtualize.
    Hw,
    /// For a KVM that emulates the guest's kernel mode.
    Emulated,
}

impl GuestKernel {
    /// By the processors' flags.
    ///
    /// # Errors
    /// Where `/proc/cpuinfo` cannot be read.
    pub fn of_this_host() -> io::Result<Self> {
        fs::read_to_string("/proc/cpuinfo").map(|cpuinfo| Self::of(&cpuinfo))
    }

    fn of(cpuinfo: &str) -> Self {
        let virtualizes = cpuinfo
            .lines()
            .filter_map(|line| line.split_once(':'))
            .filter(|(key, _)| key.trim() == "flags")
            .any(|(_, flags)| flags.split_whitespace().any(|flag| matches!(flag, "vmx" | "svm")));
        if virtualizes { Self::Hw } else { Self::Emulated }
    }
}

impl fmt::Display for GuestKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hw => "hw",
            Self::Emulated => "emulated",
        })
    }
}

/// Why a microVM's memory is not known.
#[derive(Debug, thiserror::Error)]
pub enum PssError {
    /// It ended, or it never ran on this host.
    #[error("process {0} is not on this host (any more): run this on the host of the node")]
    Gone(u32),
    /// The id belongs to somebody else: the node is another host, or the microVM ended.
    #[error("process {0} on this host is no microVM: run this on the host of the node")]
    NotAVm(u32),
    /// No right to look.
    #[error("the memory of process {0} may not be read: run this as the user of `stasis up`, or as root")]
    Denied(u32),
    /// Anything else.
    #[error("the memory of process {pid} cannot be read")]
    Io {
        /// The process.
        pid: u32,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A kernel without the field.
    #[error("/proc/{0}/smaps_rollup has no Pss: it needs Linux 4.14 with CONFIG_PROC_PAGE_MONITOR")]
    NoPss(u32),
}

/// Proportional set size of the process of a microVM, in bytes: its own pages, and its share of those that others map too.
///
/// # Errors
/// Where this is no microVM of this host, or it cannot be read.
pub fn pss_of_vm(pid: u32) -> Result<u64, PssError> {
    let read = |file: &str| {
        fs::read(format!("/proc/{pid}/{file}")).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => PssError::Gone(pid),
            io::ErrorKind::PermissionDenied => PssError::Denied(pid),
            // A process that ended while its file was open.
            _ if source.raw_os_error() == Some(3) => PssError::Gone(pid),
            _ => PssError::Io { pid, source },
        })
    };
    if !is_vm(&read("cmdline")?) {
        return Err(PssError::NotAVm(pid));
    }
    pss(&String::from_utf8_lossy(&read("smaps_rollup")?)).ok_or(PssError::NoPss(pid))
}

/// `stasis vmm`, whatever the program's file is called.
fn is_vm(cmdline: &[u8]) -> bool {
    cmdline.split(|&byte| byte == 0).nth(1) == Some(b"vmm")
}

fn pss(rollup: &str) -> Option<u64> {
    let kib = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    kib.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_decide_not_names() {
        let cpuinfo = |name, flags| format!("model name\t: {name}\nflags\t\t: fpu {flags} ht\nbugs\t\t: x\n");
        assert_eq!(GuestKernel::of(&cpuinfo("svm vmx", "sse")), GuestKernel::Emulated);
        assert_eq!(GuestKernel::of(&cpuinfo("A", "vmx")), GuestKernel::Hw);
        assert_eq!(GuestKernel::of(&cpuinfo("B", "svm")), GuestKernel::Hw);
        assert_eq!(GuestKernel::of(&cpuinfo("B", "svm_lock")), GuestKernel::Emulated);
    }

    #[test]
    fn the_rollup_s_pss_is_in_bytes() {
        let rollup = "5567f697e000-7ffe6ff62000 ---p 00000000 00:00 0  [rollup]\n\
                      Rss:                9116 kB\nPss:                1947 kB\nPss_Dirty:          1028 kB\n";
        assert_eq!(pss(rollup), Some(1947 << 10));
        assert_eq!(pss("Pss_Dirty: 3 kB\n"), None);
        assert_eq!(pss("Pss: lots kB\n"), None);
    }

    #[test]
    fn only_microvms_are_measured() {
        assert!(is_vm(b"/usr/bin/stasis\0vmm\0"));
        for other in [&b"/usr/bin/stasis\0up\0vmm\0"[..], b"vmm\0", b""] {
            assert!(!is_vm(other));
        }
        assert!(matches!(pss_of_vm(std::process::id()), Err(PssError::NotAVm(_))));
        assert!(matches!(pss_of_vm(u32::MAX), Err(PssError::Gone(_))));
    }
}
