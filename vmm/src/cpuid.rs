//! What a guest is told of its CPU: all that KVM supports, with each vCPU's own APIC id.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm};

use crate::error::{Error, Ioctl};

const LEAF_FEATURES: u32 = 0x1;
const LEAF_TOPOLOGY: u32 = 0xb;
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
const ECX_TSC_DEADLINE: u32 = 1 << 24;
const ECX_HYPERVISOR: u32 = 1 << 31;
/// Nested virtualization: of no use to a guest, and with a state in KVM that no snapshot holds and no rewind puts back.
const ECX_VMX: u32 = 1 << 5;
const LEAF_AMD_FEATURES: u32 = 0x8000_0001;
const ECX_SVM: u32 = 1 << 2;
const LEAF_SVM: u32 = 0x8000_000a;

/// The CPUID that KVM offers on this host. Costs about 0.4 ms, so ask once per VM.
pub(crate) fn supported(kvm: &Kvm) -> Result<CpuId, Error> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).ioctl("KVM_GET_SUPPORTED_CPUID")
}

/// The same for one vCPU of `vcpus`. The TSC deadline timer is offered only where KVM can give a restored guest its own TSC:
/// elsewhere a saved deadline would lie far away from the new host's counter.
pub(crate) fn for_vcpu(supported: &CpuId, kvm: &Kvm, id: u8, vcpus: u8) -> CpuId {
    let deadline = kvm.check_extension(Cap::TscDeadlineTimer) && kvm.check_extension(Cap::TscControl);
    let mut cpuid = supported.clone();
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            LEAF_FEATURES => {
                entry.ecx |= ECX_HYPERVISOR;
                entry.ecx &= !ECX_VMX;
                entry.ecx = if deadline { entry.ecx | ECX_TSC_DEADLINE } else { entry.ecx & !ECX_TSC_DEADLINE };
                // Bits 16 to 23 count the logical processors, bits 24 to 31 hold the APIC id.
                entry.ebx = entry.ebx & 0xffff | u32::from(vcpus) << 16 | u32::from(id) << 24;
            }
            LEAF_AMD_FEATURES => entry.ecx &= !ECX_SVM,
            LEAF_SVM => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
            LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2 => entry.edx = u32::from(id),
            _ => {}
        }
    }
    cpuid
}
