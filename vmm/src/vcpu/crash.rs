//! What is known of a guest that cannot go on.

use std::fmt::Write;

use kvm_ioctls::{VcpuExit, VcpuFd};
use stasis_vmm_api::GuestCrash;
use vm_memory::{Bytes, GuestAddress};

use crate::memory::GuestMemory;

/// Longest x86 instruction.
const LONGEST_INSTRUCTION: usize = 15;
/// `KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES`: the exit carries the instruction.
const HAS_INSTRUCTION: u64 = 1;

/// The exit's name in `linux/kvm.h`.
pub(super) fn name_of(exit: &VcpuExit<'_>) -> String {
    match exit {
        VcpuExit::InternalError => "KVM_EXIT_INTERNAL_ERROR".into(),
        VcpuExit::Shutdown => "KVM_EXIT_SHUTDOWN (triple fault)".into(),
        VcpuExit::FailEntry(reason, cpu) => format!("KVM_EXIT_FAIL_ENTRY (reason {reason:#x} on CPU {cpu})"),
        VcpuExit::Hlt => "KVM_EXIT_HLT".into(),
        other => format!("{other:?}"),
    }
}

/// Reads what the stopped vCPU still tells. Nothing here may fail: what cannot be read is left out.
pub(super) fn describe(fd: &mut VcpuFd, memory: &GuestMemory, vcpu: u8, mut exit: String) -> GuestCrash {
    let rip = fd.get_regs().map(|regs| regs.rip).unwrap_or_default();
    let mut bytes = None;
    if exit.starts_with("KVM_EXIT_INTERNAL_ERROR") {
        let run = fd.get_kvm_run();
        // SAFETY: KVM_RUN has just returned KVM_EXIT_INTERNAL_ERROR, for which this is the union's active member; all of its
        // bit patterns are valid.
        let failure = unsafe { run.__bindgen_anon_1.emulation_failure };
        let _ = write!(exit, " suberror {}", failure.suberror);
        if failure.suberror == kvm_bindings::KVM_INTERNAL_ERROR_EMULATION && failure.ndata >= 1 {
            let flags = failure.flags;
            // SAFETY: the union has one member, whose bit patterns are all valid.
            let instruction = unsafe { failure.__bindgen_anon_1.__bindgen_anon_1 };
            if flags & HAS_INSTRUCTION != 0 {
                let length = usize::from(instruction.insn_size).min(LONGEST_INSTRUCTION);
                bytes = Some(instruction.insn_bytes[..length].to_vec());
            }
        }
    }
    let bytes = bytes.or_else(|| at_rip(fd, memory, rip)).unwrap_or_default();
    GuestCrash { exit, vcpu, rip, instruction: bytes.iter().map(|byte| format!("{byte:02x}")).collect() }
}

fn at_rip(fd: &VcpuFd, memory: &GuestMemory, rip: u64) -> Option<Vec<u8>> {
    let place = fd.translate_gva(rip).ok().filter(|place| place.valid != 0)?;
    let mut bytes = vec![0; LONGEST_INSTRUCTION];
    memory.read_slice(&mut bytes, GuestAddress(place.physical_address)).ok()?;
    Some(bytes)
}
