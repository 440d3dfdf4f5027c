//! A vCPU's time stamp counter, as its distance from the host's.
//!
//! Written as a number, each vCPU's counter would be late by the time since its own was read; and KVM guesses from the number which counters are
//! meant to agree. A distance says it exactly: all vCPUs of a VM are moved by the same amount, and agree afterwards as they did before.

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_device_attr};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};
use vmm_sys_util::{ioctl::ioctl_with_ref, ioctl_iow_nr};

use crate::error::{Error, Ioctl};

const KVMIO: u32 = 0xae;
ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);

/// What a guest's counter is ahead of the host's, modulo 2^64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Offset(u64);

/// The host's counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostTsc(u64);

impl HostTsc {
    pub(crate) fn now() -> Self {
        // SAFETY: every x86-64 CPU has this instruction, and Linux allows it unless a process has asked otherwise, which this one never does.
        Self(unsafe { std::arch::x86_64::_rdtsc() })
    }
}

impl Offset {
    /// Whether this KVM moves a guest's counter: not before Linux 5.16, and not where guests read the host's own. Ask a vCPU that has not run.
    pub(crate) fn is_kept(vcpu: &VcpuFd) -> Result<bool, Error> {
        let Some(before) = Self::of(vcpu)? else { return Ok(false) };
        let other = Self(before.0 ^ 1);
        let there = HostTsc::now();
        other.put(vcpu, there, there)?;
        let kept = Self::of(vcpu)? == Some(other);
        before.put(vcpu, there, there)?;
        Ok(kept)
    }

    /// That of a vCPU; none where KVM has no such attribute.
    pub(crate) fn of(vcpu: &VcpuFd) -> Result<Option<Self>, Error> {
        let mut offset = 0;
        let attribute = attribute(&raw mut offset);
        // SAFETY: the argument is the struct that this ioctl reads; KVM writes eight bytes to its address, which is that of `offset`.
        let result = unsafe { ioctl_with_ref(vcpu, KVM_GET_DEVICE_ATTR(), &attribute) };
        match (result, vmm_sys_util::errno::Error::last()) {
            (0, _) => Ok(Some(Self(offset))),
            (_, error) if matches!(error.errno(), libc::ENXIO | libc::EINVAL | libc::ENOTTY) => Ok(None),
            (_, error) => Err(error).ioctl("KVM_GET_DEVICE_ATTR of the TSC's offset"),
        }
    }

    /// Lets a vCPU's counter go on, now, where it was at that time.
    pub(crate) fn put(self, vcpu: &VcpuFd, then: HostTsc, now: HostTsc) -> Result<(), Error> {
        let mut offset = self.0.wrapping_add(then.0).wrapping_sub(now.0);
        let attribute = attribute(&raw mut offset);
        // SAFETY: the argument is the struct that this ioctl reads; KVM reads eight bytes at its address, which is that of `offset`.
        let result = unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR(), &attribute) };
        match result {
            0 => Ok(()),
            _ => Err(vmm_sys_util::errno::Error::last()).ioctl("KVM_SET_DEVICE_ATTR of the TSC's offset"),
        }
    }
}

fn attribute(offset: *mut u64) -> kvm_device_attr {
    let (group, attr) = (KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET.into());
    kvm_device_attr { group, attr, addr: offset.expose_provenance() as u64, flags: 0 }
}

#[cfg(test)]
mod tests {
    use kvm_ioctls::Kvm;

    use super::*;

    #[test]
    fn counters_go_on_where_they_were_and_agree_as_before() {
        let Ok(kvm) = Kvm::new() else { return eprintln!("SKIPPED: no /dev/kvm") };
        let vm = kvm.create_vm().unwrap();
        let vcpus = [0, 1].map(|id| vm.create_vcpu(id).unwrap());
        if !Offset::is_kept(&vcpus[0]).unwrap() {
            return eprintln!("SKIPPED: this KVM moves no guest's TSC");
        }
        let offsets = || vcpus.iter().map(|vcpu| Offset::of(vcpu).unwrap()).collect::<Option<Vec<_>>>();
        let before = offsets().unwrap();
        let (then, now) = (HostTsc(5_000_000_000), HostTsc(7_000_000_000));
        for (vcpu, offset) in vcpus.iter().zip(&before) {
            offset.put(vcpu, then, now).unwrap();
        }
        let moved: Vec<_> = before.iter().map(|offset| Offset(offset.0.wrapping_sub(2_000_000_000))).collect();
        assert_eq!(offsets().unwrap(), moved);
    }
}
