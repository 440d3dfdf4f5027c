//! What a node is told at start.

use std::{ffi::OsString, path::PathBuf};

use bytesize::ByteSize;
use stasis_pool_api::Tenant;

/// Everything that differs between nodes.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// The program to run as VMM, with the argument `vmm`: stasis itself.
    pub vmm: PathBuf,
    /// A folder on a file system with reflink, for this node alone.
    pub data: PathBuf,
    /// The guest kernel, an ELF `vmlinux`.
    pub kernel: PathBuf,
    /// The kernel's initial RAM disk, if it is a distribution's, whose drivers are modules.
    pub initrd: Option<PathBuf>,
    /// Which of our two kernels the host needs.
    pub variant: KernelVariant,
    /// The root file systems that templates may start from.
    pub bases: Vec<Base>,
    /// Guest memory that all VMs together may be promised.
    pub memory: ByteSize,
    /// Processors that it may promise to guests.
    pub cores: Cores,
    /// How VMM processes are jailed.
    pub jail: Jail,
    /// The tenant whose pools stand ready before the first claim; none where all tenants are named in a file.
    pub standing_tenant: Option<Tenant>,
    /// Restores at a time; more would only slow each other down.
    pub restores_at_once: usize,
    /// Guests that may repair themselves at a time, in all pools together.
    pub repairs_at_once: usize,
}

/// Processors, and how many vCPUs may be promised on each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cores {
    /// Of the host.
    pub count: u32,
    /// vCPUs on each: most guests wait most of the time.
    pub overcommit: u32,
}

impl Cores {
    /// vCPUs that may be promised in all.
    #[must_use]
    pub fn vcpus(self) -> u64 {
        u64::from(self.count) * u64::from(self.overcommit)
    }
}

/// What differs between nodes in the jail around each VMM process.
#[derive(Debug, Clone)]
pub struct Jail {
    /// The first of the 4096 uids that VMs run as, one each. No other user or node of the host may have them.
    pub uid_base: u32,
    /// Bytes that a VM may read, and write, per second from the disk of the data folder; as many as it can if not given.
    pub disk_rate: Option<ByteSize>,
    /// All that is in a VMM process's environment.
    pub environment: Vec<(OsString, OsString)>,
}

/// A root file system.
#[derive(Debug, Clone)]
pub struct Base {
    /// What `base = "…"` in a `template.toml` calls it.
    pub name: String,
    /// A raw ext4 image.
    pub image: PathBuf,
}

/// The two guest kernels (design, "The microVM").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelVariant {
    /// For hosts with VMX or SVM.
    Hw,
    /// For hosts whose KVM interprets guest kernel code.
    Emulated,
}

impl KernelVariant {
    /// The kernel command line, to which the VMM adds its devices; of a kernel with an initial RAM disk, which finds them in ACPI's tables.
    #[must_use]
    pub const fn cmdline(self, initrd: bool) -> &'static str {
        match self {
            // The root is the RAM disk's to mount, and /sbin/stasis-agent its to run.
            Self::Hw if initrd => "console=ttyS0 quiet reboot=k panic=-1",
            // vCPUs and the IOAPIC come from the MP table.
            Self::Hw => "console=ttyS0 quiet reboot=k panic=-1 acpi=off root=/dev/vda rw init=/sbin/stasis-agent",
            Self::Emulated => concat!(
                "console=ttyS0 quiet reboot=k panic=-1 root=/dev/vda rw init=/sbin/stasis-agent",
                // The guest kernel can save only the SSE registers (no XSAVE in KVM's interpreter), yet user code executes CPUID and
                // XGETBV on the host's CPU and is told that AVX works. What it then keeps in wider registers is lost, or taken
                // from another process, at the next context switch. The kernel hands what it does not know to init as
                // environment, and the agent hands it on: these are the switches of glibc, OpenSSL, simdutf (Node.js) and numpy.
                " GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX,-AVX2,-AVX512F,-AVX512VL,-AVX512BW,-AVX512CD,-AVX512DQ,-FMA,-FMA4",
                ",-AVX_Fast_Unaligned_Load",
                " OPENSSL_ia32cap=~0x1c00100000000000:~0x600dc230020",
                " SIMDUTF_FORCE_IMPLEMENTATION=westmere",
                " NPY_DISABLE_CPU_FEATURES=AVX,F16C,FMA3,AVX2,AVX512F,AVX512CD,AVX512_SKX,AVX512_CLX,AVX512_CNL,AVX512_ICL",
            ),
        }
    }

    /// As paths and messages show it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hw => "hw",
            Self::Emulated => "emulated",
        }
    }
}
