//! A VM's state beside its memory, as bytes.

use std::{fs::File, io::Read};

use kvm_bindings::{kvm_clock_data, kvm_irqchip, kvm_pit_state2};
use serde::{Deserialize, Serialize};
use stasis_guest_wire::page::WakePage;
use stasis_vmm_api::MachineSpec;

use crate::{
    console::ConsoleState,
    error::{Error, Host},
    traits::HostTraits,
    vcpu::{HostTsc, VcpuState},
    virtio::TransportState,
};

/// First bytes of every state file.
const MAGIC: [u8; 8] = *b"STASISVM";
/// Raised with every change of [`VmState`].
const FORMAT: u32 = 6;
/// More than any machine needs; a longer file is not one of ours.
const MAX_LENGTH: u64 = 16 << 20;

/// Everything but memory and disks.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct VmState {
    pub(crate) machine: MachineSpec,
    /// Of the host that took it.
    pub(crate) host: HostTraits,
    /// When, by that host's counter.
    pub(crate) taken_at: HostTsc,
    pub(crate) vcpus: Vec<VcpuState>,
    pub(crate) irqchips: Vec<kvm_irqchip>,
    pub(crate) pit: kvm_pit_state2,
    pub(crate) clock: kvm_clock_data,
    pub(crate) console: ConsoleState,
    pub(crate) devices: Vec<TransportState>,
    /// Where the guest waits for its first order.
    pub(crate) wake_page: Option<WakePage>,
}

impl VmState {
    /// The bytes of its file.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, Error> {
        let body = postcard::to_allocvec(self).map_err(|error| Error::Snapshot(error.to_string()))?;
        Ok([&Self::head()[..], &body].concat())
    }

    /// Reads a state whose file the node has already checked against its manifest.
    pub(crate) fn read(from: &File) -> Result<Self, Error> {
        let mut bytes = Vec::new();
        from.take(MAX_LENGTH).read_to_end(&mut bytes).host("read of the VM's state")?;
        Self::decode(&bytes)
    }

    /// That it is the state of `machine`, and whole, and that its guest can go on on a host with the traits of `here`.
    pub(crate) fn check(&self, machine: &MachineSpec, here: &HostTraits, irqchips: &[u32]) -> Result<(), Error> {
        self.host.check(here)?;
        if self.machine.as_seen_by_guest() != machine.as_seen_by_guest() {
            let (asked, found) = (machine, &self.machine);
            return Err(Error::Snapshot(format!("the machine is {asked:?}, the snapshot's was {found:?}")));
        }
        if self.vcpus.len() != usize::from(machine.vcpus) {
            return Err(Error::Snapshot(format!("{} vCPUs, and the states of {}", machine.vcpus, self.vcpus.len())));
        }
        if !self.irqchips.iter().map(|chip| chip.chip_id).eq(irqchips.iter().copied()) {
            return Err(Error::Snapshot("the interrupt controllers are not those of this machine".into()));
        }
        Ok(())
    }

    /// What every state file begins with.
    pub(crate) fn head() -> [u8; 12] {
        let mut head = [0; 12];
        head[..8].copy_from_slice(&MAGIC);
        head[8..].copy_from_slice(&FORMAT.to_le_bytes());
        head
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let refuse = |reason: &str| Err(Error::Snapshot(reason.to_owned()));
        let Some(rest) = bytes.strip_prefix(&MAGIC) else { return refuse("this is not a VM's state") };
        let Some((format, body)) = rest.split_first_chunk::<4>() else { return refuse("the VM's state is cut") };
        let format = u32::from_le_bytes(*format);
        if format != FORMAT {
            let (what, was, is) = ("format of a VM's state", format.to_string(), FORMAT.to_string());
            return Err(Error::Incompatible { what, was, is });
        }
        postcard::from_bytes(body).map_err(|error| Error::Snapshot(format!("the VM's state: {error}")))
    }
}

/// The machine of a VM's state, which is read from its start.
///
/// # Errors
/// Where the file is no state, or of another format.
pub fn machine_of(state: &File) -> Result<MachineSpec, Error> {
    VmState::read(state).map(|state| state.machine)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_state_of_another_stasis_is_refused_so_that_its_template_is_built_again() {
        let mut head = VmState::head();
        head[8] -= 1;
        match VmState::decode(&head) {
            Err(error @ Error::Incompatible { .. }) => assert!(error.chain().contains("format"), "{error}"),
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(body in proptest::collection::vec(any::<u8>(), 0..4096), ours: bool) {
            let bytes = if ours { [&VmState::head()[..], &body].concat() } else { body };
            prop_assert!(VmState::decode(&bytes).is_err());
        }
    }
}
