//! FPU and vector registers, as many as there are: an XSAVE area of the length that this host's KVM says.

use kvm_bindings::{Xsave, kvm_xsave};
use kvm_ioctls::{Cap, Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Ioctl};

const WORD: usize = size_of::<u32>();
/// Words of an area that KVM calls by its old name, where it knows no other.
const WORDS: usize = size_of::<kvm_xsave>() / WORD;

/// Bytes of a vCPU's area on this host (`KVM_CAP_XSAVE2`). More than 4 KiB with AMX, for which this process would have to ask.
pub(crate) fn area_bytes(kvm: &Kvm) -> u32 {
    let bytes = u32::try_from(kvm.check_extension_int(Cap::Xsave2)).unwrap_or_default();
    bytes.max(u32::try_from(WORDS * WORD).unwrap_or_default())
}

/// An area.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Fpu(Vec<u32>);

impl Fpu {
    /// That of a paused vCPU, on a host whose areas have `bytes`.
    pub(crate) fn save(vcpu: &VcpuFd, bytes: u32) -> Result<Self, Error> {
        let words = (bytes as usize).div_ceil(WORD);
        if words <= WORDS {
            let area = vcpu.get_xsave().ioctl("KVM_GET_XSAVE")?;
            return Ok(Self(area.region.to_vec()));
        }
        let mut area = empty(words)?;
        // SAFETY: the area has as many bytes as KVM_CAP_XSAVE2 says that KVM writes.
        unsafe { vcpu.get_xsave2(&mut area) }.ioctl("KVM_GET_XSAVE2")?;
        let head = area.as_fam_struct_ref().xsave.region;
        Ok(Self([&head[..], area.as_slice()].concat()))
    }

    /// Puts it into a paused vCPU, on a host whose areas have `bytes`.
    pub(crate) fn restore(&self, vcpu: &VcpuFd, bytes: u32) -> Result<(), Error> {
        let words = (bytes as usize).div_ceil(WORD).max(WORDS);
        if self.0.len() != words {
            let (found, expected) = (self.0.len() * WORD, words * WORD);
            return Err(Error::Snapshot(format!("an FPU's state of {found} bytes; this host's have {expected}")));
        }
        let mut area = empty(words)?;
        let (head, rest) = self.0.split_at(WORDS);
        area.as_mut_slice().copy_from_slice(rest);
        // SAFETY: the length of what lies behind the head stays as it is.
        let fam = unsafe { area.as_mut_fam_struct() };
        fam.xsave.region.copy_from_slice(head);
        // SAFETY: the area has as many bytes as KVM_CAP_XSAVE2 says that KVM reads: it was checked above.
        unsafe { vcpu.set_xsave2(&area) }.ioctl("KVM_SET_XSAVE")
    }
}

fn empty(words: usize) -> Result<Xsave, Error> {
    Xsave::new(words - WORDS).map_err(|_| Error::Snapshot("an FPU's state of an impossible length".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_saved_comes_back_and_no_other_length_does() {
        let Ok(kvm) = Kvm::new() else { return eprintln!("SKIPPED: no /dev/kvm") };
        let vm = kvm.create_vm().unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let bytes = area_bytes(&kvm);
        let mut saved = Fpu::save(&vcpu, bytes).unwrap();
        // XMM0 in the legacy area, bytes 160 to 175, and the header's word that says so (bit 1: SSE).
        saved.0[40..44].copy_from_slice(&[1, 2, 3, 4]);
        saved.0[128] |= 0b10;
        saved.restore(&vcpu, bytes).unwrap();
        assert_eq!(Fpu::save(&vcpu, bytes).unwrap().0[40..44], [1, 2, 3, 4]);
        for wrong in [saved.0.len() - 1, saved.0.len() + 64, 0] {
            let mut other = saved.clone();
            other.0.resize(wrong, 0);
            assert!(matches!(other.restore(&vcpu, bytes), Err(Error::Snapshot(_))), "{wrong}");
        }
    }
}
