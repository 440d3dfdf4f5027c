//! What the hardware and the kernel alone take for a claim: the same state put into the same kind of VM, by code that has no device, no
//! thread and no process. `stasis bench vmm` sets its own figures beside these.

use std::{
    fs::File,
    os::fd::{FromRawFd, IntoRawFd},
    sync::Arc,
    time::{Duration, Instant},
};

use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit};

use crate::{
    error::{Error, Ioctl},
    layout,
    memory::Room,
    snapshot::VmState,
    vcpu::{cpuid_entries, put_state},
};

/// Restores a snapshot of a one-vCPU VM that ends with a port access, and times it: from the mapping of the image to the guest's first
/// exit. The VM itself is built before.
///
/// # Errors
/// Where KVM or the snapshot fails.
pub fn claim(kvm: File, image: &File, state: &File) -> Result<Duration, Error> {
    let state = Arc::new(VmState::read(state)?);
    let [saved] = &state.vcpus[..] else { return Err(Error::Refused("the limit is measured with one vCPU")) };
    // SAFETY: the descriptor is owned by nobody else; any other file than `/dev/kvm` fails the first ioctl.
    let kvm = unsafe { Kvm::from_raw_fd(kvm.into_raw_fd()) };
    let vm = kvm.create_vm().ioctl("KVM_CREATE_VM")?;
    let room = Room::reserve(state.machine.memory_mib)?;
    let (userspace_addr, memory_size) = (room.addresses().start, room.size() as u64);
    let slot = kvm_userspace_memory_region { slot: 0, flags: 0, guest_phys_addr: 0, memory_size, userspace_addr };
    // SAFETY: the range is the room's, which outlives the VM's only run below.
    unsafe { vm.set_user_memory_region(slot) }.ioctl("KVM_SET_USER_MEMORY_REGION")?;
    vm.set_tss_address(layout::TSS).ioctl("KVM_SET_TSS_ADDR")?;
    vm.create_irq_chip().ioctl("KVM_CREATE_IRQCHIP")?;
    vm.create_pit2(kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() }).ioctl("KVM_CREATE_PIT2")?;
    let mut vcpu = vm.create_vcpu(0).ioctl("KVM_CREATE_VCPU")?;
    vcpu.set_cpuid2(&cpuid_entries(saved.cpuid())?).ioctl("KVM_SET_CPUID2")?;

    let start = Instant::now();
    let _memory = room.map_private(image)?;
    put_state(&vcpu, saved)?;
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
