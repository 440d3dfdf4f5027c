//! What the hardware and the kernel alone take for a claim: the same state put into the same kind of VM, by code that has no device, no
//! thread and no process. `stasis bench vmm` sets its own figures beside these.

use std::{
    fs::File,
    sync::Arc,
    time::{Duration, Instant},
};

use kvm_ioctls::VcpuExit;

pub use crate::boot::flat::{LOADED_AT, MAGIC};
use crate::{
    error::{Error, Ioctl},
    memory::Room,
    snapshot::VmState,
    vcpu::{Gap, HostTsc, cpuid_entries, put_state},
    vm::{create_vm, open_kvm},
};

/// Restores a snapshot of a one-vCPU VM that ends with a port access, and times it: from the mapping of the image to the guest's first
/// exit. The VM itself is built before.
///
/// # Errors
/// Where KVM or the snapshot fails.
pub fn claim(kvm: File, image: &File, state: &File) -> Result<Duration, Error> {
    let state = Arc::new(VmState::read(state)?);
    let [saved] = &state.vcpus[..] else { return Err(Error::Refused("the limit is measured with one vCPU")) };
    let room = Room::reserve(state.machine.memory_mib)?;
    let vm = create_vm(&open_kvm(kvm), &room)?;
    let mut vcpu = vm.create_vcpu(0).ioctl("KVM_CREATE_VCPU")?;
    vcpu.set_cpuid2(&cpuid_entries(saved.cpuid())?).ioctl("KVM_SET_CPUID2")?;

    let start = Instant::now();
    let _memory = room.map_private(image)?;
    let gap = Gap { then: state.taken_at, now: HostTsc::now() };
    put_state(&vcpu, saved, state.host.xsave_bytes(), gap)?;
    for chip in &state.irqchips {
        vm.set_irqchip(chip).ioctl("KVM_SET_IRQCHIP")?;
    }
    vm.set_pit2(&state.pit).ioctl("KVM_SET_PIT2")?;
    vm.set_clock(&state.clock).ioctl("KVM_SET_CLOCK")?;
    match vcpu.run().ioctl("KVM_RUN")? {
        VcpuExit::IoOut(..) => Ok(start.elapsed()),
        _ => Err(Error::Refused("the guest's first exit was no port access")),
    }
}
