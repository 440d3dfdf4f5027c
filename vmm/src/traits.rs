//! What a snapshot depends on of the host that made it. A guest has looked at these things at its boot and will not look again: on a host
//! where they are different it would fail later, and worse.

use std::hash::Hasher;

use kvm_bindings::CpuId;
use kvm_ioctls::{Cap, Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

use crate::{
    cpuid,
    error::{Error, Ioctl},
    vcpu,
};

const LEAF_VENDOR: u32 = 0;
const LEAF_MODEL: u32 = 1;
/// How far two hosts' TSCs may be apart: KVM's own tolerance before it scales (`tsc_tolerance_ppm`, arch/x86/kvm/x86.c).
const TSC_TOLERANCE_PPM: u64 = 250;
/// What KVM must be able to do as it did when the state was taken.
const CAPABILITIES: [(&str, Cap); 6] = [
    ("XSAVE", Cap::Xsave),
    ("XCRS", Cap::Xcrs),
    ("ADJUST_CLOCK", Cap::AdjustClock),
    ("TSC_DEADLINE_TIMER", Cap::TscDeadlineTimer),
    ("DEBUGREGS", Cap::Debugregs),
    ("VCPU_EVENTS", Cap::VcpuEvents),
];

/// The traits of one host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostTraits {
    /// The CPU's vendor, as CPUID spells it.
    vendor: String,
    /// Family, model and stepping, as CPUID packs them.
    model: u32,
    /// Over all that KVM offers a guest of this CPU, microcode's bits included.
    cpuid: u64,
    /// Ticks per millisecond; 0 where KVM does not know.
    tsc_khz: u32,
    /// One bit for each of [`CAPABILITIES`].
    capabilities: u32,
    /// Bytes of an XSAVE area.
    xsave_bytes: u32,
}

impl HostTraits {
    /// Those of this host; `vcpu` is any of its vCPUs.
    pub(crate) fn of(kvm: &Kvm, supported: &CpuId, vcpu: &VcpuFd) -> Result<Self, Error> {
        // As the first vCPU of one sees it: what KVM offers holds traces of the CPU that happened to answer.
        let offered = cpuid::for_vcpu(supported, kvm, 0, 1);
        let leaf = |function| offered.as_slice().iter().find(|entry| entry.function == function).copied();
        let [vendor, model] = [LEAF_VENDOR, LEAF_MODEL].map(|function| leaf(function).unwrap_or_default());
        let bytes = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat();
        // Fowler, Noll and Vo's hash with 64 bits: the same in every version of this program, and nobody is to be fooled by it.
        let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
        for entry in offered.as_slice() {
            for word in [entry.function, entry.index, entry.eax, entry.ebx, entry.ecx, entry.edx] {
                hash.write(&word.to_le_bytes());
            }
        }
        let bits = CAPABILITIES.iter().enumerate().filter(|(_, (_, capability))| kvm.check_extension(*capability));
        Ok(Self {
            vendor: String::from_utf8_lossy(&bytes).into_owned(),
            model: model.eax,
            cpuid: hash.finish(),
            tsc_khz: vcpu.get_tsc_khz().ioctl("KVM_GET_TSC_KHZ")?,
            capabilities: bits.fold(0, |all, (bit, _)| all | 1 << bit),
            xsave_bytes: vcpu::area_bytes(kvm),
        })
    }

    pub(crate) const fn xsave_bytes(&self) -> u32 {
        self.xsave_bytes
    }

    /// That a guest of a host with these traits can go on here.
    pub(crate) fn check(&self, here: &Self) -> Result<(), Error> {
        let differ = |what, was: String, is: String| Err(Error::Incompatible { what, was, is });
        if self.vendor != here.vendor {
            return differ("CPU vendor", self.vendor.clone(), here.vendor.clone());
        }
        if self.model != here.model {
            return differ("CPU model", format!("{:#x}", self.model), format!("{:#x}", here.model));
        }
        if self.cpuid != here.cpuid {
            return differ(
                "CPUID (features or microcode)",
                format!("{:016x}", self.cpuid),
                format!("{:016x}", here.cpuid),
            );
        }
        let apart = u64::from(self.tsc_khz.abs_diff(here.tsc_khz)) * 1_000_000;
        if apart > u64::from(self.tsc_khz) * TSC_TOLERANCE_PPM {
            return differ("TSC frequency", format!("{} kHz", self.tsc_khz), format!("{} kHz", here.tsc_khz));
        }
        if self.xsave_bytes != here.xsave_bytes {
            let bytes = |bytes: u32| format!("{bytes} bytes");
            return differ("size of the FPU's state", bytes(self.xsave_bytes), bytes(here.xsave_bytes));
        }
        let missing = self.capabilities & !here.capabilities;
        match CAPABILITIES.iter().enumerate().find(|(bit, _)| missing >> bit & 1 != 0) {
            Some((_, (name, _))) => differ("KVM capability", (*name).to_owned(), "missing".to_owned()),
            None => Ok(()),
        }
    }
}

struct Fnv(u64);

impl Hasher for Fnv {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> HostTraits {
        HostTraits {
            vendor: "AuthenticAMD".into(),
            model: 0xa2_0f10,
            cpuid: 7,
            tsc_khz: 2_000_000,
            capabilities: 0b11_1111,
            xsave_bytes: 4096,
        }
    }

    #[test]
    fn each_difference_is_named() {
        let refused = |change: fn(&mut HostTraits)| {
            let mut here = host();
            change(&mut here);
            match host().check(&here) {
                Err(Error::Incompatible { what, was, is }) => format!("{what}: {was}, {is}"),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(refused(|here| here.vendor = "GenuineIntel".into()), "CPU vendor: AuthenticAMD, GenuineIntel");
        assert_eq!(refused(|here| here.model += 1), "CPU model: 0xa20f10, 0xa20f11");
        assert!(refused(|here| here.cpuid = 8).starts_with("CPUID"));
        assert_eq!(refused(|here| here.tsc_khz = 2_000_501), "TSC frequency: 2000000 kHz, 2000501 kHz");
        assert_eq!(refused(|here| here.xsave_bytes = 11008), "size of the FPU's state: 4096 bytes, 11008 bytes");
        assert_eq!(refused(|here| here.capabilities = 0b11_1101), "KVM capability: XCRS, missing");
    }

    #[test]
    fn what_makes_no_difference_is_let_pass() {
        let drifted = HostTraits { tsc_khz: 2_000_499, ..host() };
        assert!(host().check(&host()).is_ok() && host().check(&drifted).is_ok());
        let old = HostTraits { capabilities: 0b1, ..host() };
        assert!(old.check(&host()).is_ok(), "more capabilities than were there do no harm");
    }

    #[test]
    fn this_host_has_the_same_traits_however_often_one_asks() {
        let Ok(kvm) = Kvm::new() else { return eprintln!("SKIPPED: no /dev/kvm") };
        let vm = kvm.create_vm().unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let traits = || HostTraits::of(&kvm, &cpuid::supported(&kvm).unwrap(), &vcpu).unwrap();
        let first = traits();
        // On whichever CPU the kernel puts each thread.
        for _ in 0..50 {
            std::thread::yield_now();
            assert_eq!(traits(), first);
        }
    }
}
