//! A vCPU's registers, saved and put back.

use kvm_bindings::{
    CpuId, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs,
};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use super::{
    fpu::Fpu,
    tsc::{HostTsc, Offset},
};
use crate::error::{Error, Ioctl};

/// Counts cycles; must be set before the deadline.
const MSR_TSC: u32 = 0x10;
/// Fires when the TSC reaches it; must be set after the TSC and after the local APIC that it belongs to.
const MSR_TSC_DEADLINE: u32 = 0x6e0;

/// What KVM takes in one call is 255 at most (`MAX_IO_MSRS`, arch/x86/kvm/x86.c).
const MSRS_AT_ONCE: usize = 200;
/// State that KVM keeps, and gives a guest, but does not list: the memory types' ranges (variable, fixed, default) and the machine check's
/// banks, with their second control registers.
const UNLISTED: [std::ops::RangeInclusive<u32>; 7] =
    [0x200..=0x20f, 0x250..=0x250, 0x258..=0x259, 0x268..=0x26f, 0x280..=0x29f, 0x2ff..=0x2ff, 0x400..=0x47f];

/// Everything that KVM keeps of a vCPU.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct VcpuState {
    cpuid: Vec<kvm_cpuid_entry2>,
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    fpu: Fpu,
    /// None where KVM keeps none: the counter is then among the MSRs, as a number.
    tsc: Option<Offset>,
    xcrs: Option<kvm_xcrs>,
    debug_regs: kvm_debugregs,
    lapic: kvm_lapic_state,
    msrs: Vec<kvm_msr_entry>,
    events: kvm_vcpu_events,
}

impl VcpuState {
    /// What the guest was told of its CPU.
    pub(crate) fn cpuid(&self) -> &[kvm_cpuid_entry2] {
        &self.cpuid
    }

    /// Whether KVM looks into the guest's memory when this is put in.
    pub(crate) fn reads_memory(&self) -> bool {
        has_page_pointers(&self.sregs)
    }
}

/// Whether the vCPU has page directory pointers, which KVM reads from memory with the special registers: those of PAE outside of long mode
/// (`is_pae_paging`, arch/x86/kvm/x86.h).
fn has_page_pointers(sregs: &kvm_sregs) -> bool {
    const CR0_PG: u64 = 1 << 31;
    const CR4_PAE: u64 = 1 << 5;
    const EFER_LMA: u64 = 1 << 10;
    sregs.cr0 & CR0_PG != 0 && sregs.cr4 & CR4_PAE != 0 && sregs.efer & EFER_LMA == 0
}

/// What has to be known of the host to read a vCPU's state.
#[derive(Debug)]
pub(crate) struct Extent {
    /// The MSRs that KVM lists.
    pub(crate) msrs: Vec<u32>,
    /// Bytes of an XSAVE area.
    pub(crate) xsave_bytes: u32,
    /// Whether the TSC can be read and put as an offset.
    pub(crate) tsc_offset: bool,
}

/// Saves a paused vCPU whose guest was told `cpuid`, and that was restored to `earlier`, if it was.
pub(crate) fn save(
    vcpu: &VcpuFd,
    cpuid: &[kvm_cpuid_entry2],
    extent: &Extent,
    earlier: Option<&VcpuState>,
) -> Result<VcpuState, Error> {
    // The order matters in one place: reading the events clears nothing, but MP state must be read first, since KVM may update pending
    // events when it is (Documentation/virt/kvm/api.rst, KVM_GET_MP_STATE).
    let mp_state = vcpu.get_mp_state().ioctl("KVM_GET_MP_STATE")?;
    let tsc = if extent.tsc_offset { Offset::of(vcpu)? } else { None };
    let msrs = match earlier {
        Some(earlier) => read_msrs(vcpu, &earlier.msrs)?,
        None => find_msrs(vcpu, &extent.msrs, tsc)?,
    };
    Ok(VcpuState {
        mp_state,
        regs: vcpu.get_regs().ioctl("KVM_GET_REGS")?,
        sregs: vcpu.get_sregs().ioctl("KVM_GET_SREGS")?,
        fpu: Fpu::save(vcpu, extent.xsave_bytes)?,
        xcrs: save_xcrs(vcpu)?,
        debug_regs: vcpu.get_debug_regs().ioctl("KVM_GET_DEBUGREGS")?,
        lapic: vcpu.get_lapic().ioctl("KVM_GET_LAPIC")?,
        msrs,
        tsc,
        events: vcpu.get_vcpu_events().ioctl("KVM_GET_VCPU_EVENTS")?,
        cpuid: cpuid.to_vec(),
    })
}

/// None where KVM has none: it then knows no such ioctl (`KVM_CAP_XCRS`).
fn save_xcrs(vcpu: &VcpuFd) -> Result<Option<kvm_xcrs>, Error> {
    match vcpu.get_xcrs() {
        Ok(xcrs) => Ok(Some(xcrs)),
        Err(error) if matches!(error.errno(), libc::EINVAL | libc::ENOTTY) => Ok(None),
        Err(error) => Err(error).ioctl("KVM_GET_XCRS"),
    }
}

/// CPUID entries as KVM takes them.
pub(crate) fn cpuid_entries(entries: &[kvm_cpuid_entry2]) -> Result<CpuId, Error> {
    CpuId::from_entries(entries).map_err(|_| Error::Snapshot("too many CPUID entries".into()))
}

/// The two moments between which no time passes for a guest: when its state was read, and the present.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gap {
    pub(crate) then: HostTsc,
    pub(crate) now: HostTsc,
}

/// Puts a state into a paused vCPU of a VM whose interrupt controllers exist, whether it has run or not. Its CPUID must be the state's.
pub(crate) fn restore(vcpu: &VcpuFd, state: &VcpuState, xsave_bytes: u32, gap: Gap) -> Result<(), Error> {
    vcpu.set_mp_state(state.mp_state).ioctl("KVM_SET_MP_STATE")?;
    vcpu.set_regs(&state.regs).ioctl("KVM_SET_REGS")?;
    vcpu.set_sregs(&state.sregs).ioctl("KVM_SET_SREGS")?;
    state.fpu.restore(vcpu, xsave_bytes)?;
    if let Some(xcrs) = &state.xcrs {
        vcpu.set_xcrs(xcrs).ioctl("KVM_SET_XCRS")?;
    }
    vcpu.set_debug_regs(&state.debug_regs).ioctl("KVM_SET_DEBUGREGS")?;
    vcpu.set_lapic(&state.lapic).ioctl("KVM_SET_LAPIC")?;
    restore_counter(vcpu, state, gap)?;
    write_msrs(vcpu, &state.msrs)?;
    vcpu.set_vcpu_events(&state.events).ioctl("KVM_SET_VCPU_EVENTS")?;
    // Tells the guest's watchdogs that time has been taken from it. A guest without kvm-clock has none to tell.
    match vcpu.kvmclock_ctrl() {
        Err(error) if error.errno() != libc::EINVAL => Err(error).ioctl("KVM_KVMCLOCK_CTRL"),
        _ => Ok(()),
    }
}

/// Puts the part of a state that counts time into a paused vCPU.
pub(crate) fn restore_time(vcpu: &VcpuFd, state: &VcpuState, gap: Gap) -> Result<(), Error> {
    restore_counter(vcpu, state, gap)?;
    let time = |entry: &&kvm_msr_entry| matches!(entry.index, MSR_TSC | MSR_TSC_DEADLINE);
    write_msrs(vcpu, &state.msrs.iter().filter(time).copied().collect::<Vec<_>>())
}

fn restore_counter(vcpu: &VcpuFd, state: &VcpuState, gap: Gap) -> Result<(), Error> {
    state.tsc.map_or(Ok(()), |offset| offset.put(vcpu, gap.then, gap.now))
}

/// All MSRs of `indices`, and of those that it does not list, that this KVM reads and takes back, the deadline last; without the counter if its
/// offset is known, which a number written back would change.
///
/// An MSR that KVM refuses to write back to the very vCPU that it was read from holds nothing that a restore could bring back (it is
/// read-only, or a feature that the guest does not have), so it is not state.
fn find_msrs(vcpu: &VcpuFd, indices: &[u32], tsc: Option<Offset>) -> Result<Vec<kvm_msr_entry>, Error> {
    let mut kept = Vec::with_capacity(indices.len());
    let mut all: Vec<u32> = indices.iter().copied().chain(UNLISTED.into_iter().flatten()).collect();
    all.retain(|index| tsc.is_none() || *index != MSR_TSC);
    all.sort_unstable();
    all.dedup();
    let mut rest: Vec<kvm_msr_entry> =
        all.into_iter().map(|index| kvm_msr_entry { index, ..Default::default() }).collect();
    rest.sort_by_key(|entry| (entry.index == MSR_TSC_DEADLINE, entry.index != MSR_TSC));
    // KVM stops at the first MSR that it cannot read or write: skip that one and go on behind it.
    while !rest.is_empty() {
        let count = rest.len().min(MSRS_AT_ONCE);
        let mut msrs = to_msrs(&rest[..count])?;
        let read = vcpu.get_msrs(&mut msrs).ioctl("KVM_GET_MSRS")?;
        kept.extend_from_slice(&msrs.as_slice()[..read]);
        rest.drain(..(read + 1).min(count));
    }
    let mut writable = Vec::with_capacity(kept.len());
    while !kept.is_empty() {
        let count = kept.len().min(MSRS_AT_ONCE);
        let written = vcpu.set_msrs(&to_msrs(&kept[..count])?).ioctl("KVM_SET_MSRS")?;
        writable.extend_from_slice(&kept[..written]);
        kept.drain(..(written + 1).min(count));
    }
    Ok(writable)
}

/// The same MSRs as they are now: which ones are state was found out when the first snapshot was taken, on a host with the same traits.
fn read_msrs(vcpu: &VcpuFd, same: &[kvm_msr_entry]) -> Result<Vec<kvm_msr_entry>, Error> {
    let mut found = Vec::with_capacity(same.len());
    for entries in same.chunks(MSRS_AT_ONCE) {
        let mut msrs = to_msrs(entries)?;
        let read = vcpu.get_msrs(&mut msrs).ioctl("KVM_GET_MSRS")?;
        if let Some(refused) = entries.get(read) {
            return Err(Error::Msr(refused.index));
        }
        found.extend_from_slice(msrs.as_slice());
    }
    Ok(found)
}

fn to_msrs(entries: &[kvm_msr_entry]) -> Result<Msrs, Error> {
    Msrs::from_entries(entries).map_err(|_| Error::Snapshot("too many MSRs".into()))
}

fn write_msrs(vcpu: &VcpuFd, entries: &[kvm_msr_entry]) -> Result<(), Error> {
    for entries in entries.chunks(MSRS_AT_ONCE) {
        let written = vcpu.set_msrs(&to_msrs(entries)?).ioctl("KVM_SET_MSRS")?;
        if let Some(refused) = entries.get(written) {
            return Err(Error::Msr(refused.index));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pae_outside_of_long_mode_has_pointers_in_memory() {
        let [pg, pae, lma] = [0x8000_0001, 0x20, 0x500];
        for (name, cr0, cr4, efer, has) in [
            ("real mode", 0x10, 0, 0, false),
            ("PAE before paging", 1, pae, 0, false),
            ("32-bit paging", pg, 0, 0, false),
            ("PAE paging", pg, pae, 0, true),
            ("long mode", pg, pae, lma, false),
        ] {
            let sregs = kvm_sregs { cr0, cr4, efer, ..Default::default() };
            assert_eq!(has_page_pointers(&sregs), has, "{name}");
        }
    }
}
