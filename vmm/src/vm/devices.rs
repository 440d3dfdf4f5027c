//! Which devices a machine has, in which order, on which lines and registers.

use std::{
    fs::File,
    ops::Range,
    sync::{Arc, Mutex},
};

use stasis_vmm_api::MachineSpec;
use vmm_sys_util::eventfd::EventFd;

use super::{HostSide, Phase, Vm};
use crate::{
    boot::Found,
    bus::lock,
    error::Error,
    layout,
    memory::{GuestMemory, discard::Discard},
    virtio::{
        Device, Transport,
        balloon::{self, Balloon},
        block::{self, Block},
        net::{self, Net},
        rate_limit::Limiter,
        rng::{self, Entropy},
        vsock::{self, Vsock},
        watch::Sources,
    },
};

/// Makes the devices and puts them on their lines.
pub(super) fn assemble(
    machine: &MachineSpec,
    memory: &GuestMemory,
    files: Vec<File>,
    interrupts: Vec<EventFd>,
    host: &HostSide,
) -> Result<Vec<Arc<Mutex<Transport>>>, Error> {
    let mut virtio = Vec::new();
    for ((device, interrupt), count) in
        make(machine, memory, files, host)?.into_iter().zip(interrupts).zip(queues(machine))
    {
        let transport = Transport::new(device, memory.clone(), interrupt)?;
        if transport.queue_count() != count {
            return Err(Error::Refused("the shell was prepared for other devices"));
        }
        virtio.push(Arc::new(Mutex::new(transport)));
    }
    Ok(virtio)
}

impl Vm {
    /// Comes back to a device, after everything else that waits.
    pub(super) fn again(&self, device: usize) -> Result<(), Error> {
        match self.notifications.iter().find(|notification| notification.device == device) {
            Some(first) => first.again(),
            None => Ok(()),
        }
    }

    /// A device's own source is ready. The devices of a guest that does not run leave its memory alone until it does.
    pub(crate) fn source_ready(&self, index: usize, number: u8) -> Result<(), Error> {
        let Some(device) = self.bus.virtio.get(index) else { return Ok(()) };
        if self.phase != Phase::Running {
            lock(device).quiet();
            return Ok(());
        }
        if lock(device).source_ready(number)? { self.again(index) } else { Ok(()) }
    }

    /// Devices take up what was left when the guest stopped running.
    pub(super) fn wake_devices(&self) -> Result<(), Error> {
        for (index, device) in self.bus.virtio.iter().enumerate() {
            if lock(device).wake()? {
                self.again(index)?;
            }
        }
        Ok(())
    }

    /// The guest addresses of what it gave up, which is not the image's, whether there is a page or not.
    pub(super) fn given_up(&self) -> Vec<Range<u64>> {
        let mut devices = self.bus.virtio.iter().map(|device| lock(device));
        let balloon = devices.find_map(|mut device| {
            device.device().as_balloon().map(|balloon| balloon.discard().holes().iter().cloned().collect())
        });
        balloon.unwrap_or_default()
    }

    /// Makes all memory that the guest gave up the image's again.
    pub(super) fn take_memory_back(&self) -> Result<(), Error> {
        for device in &self.bus.virtio {
            if let Some(balloon) = lock(device).device().as_balloon() {
                balloon.discard().fill_holes()?;
            }
        }
        Ok(())
    }

    /// Asks the guest for a balloon of this size.
    pub(crate) fn set_balloon(&self, target_mib: u32) -> Result<(), Error> {
        const NONE: Error = Error::Refused("this machine has no balloon");
        // It is the last device.
        let Some(device) = self.bus.virtio.last().filter(|_| self.machine.balloon) else { return Err(NONE) };
        let target = u64::from(target_mib) << 20;
        lock(device).configure(|device| device.as_balloon().map_or(Err(NONE), |balloon| balloon.set_target(target)))
    }
}

/// The devices in their order: disks and vsock first, so that what is added later moves neither.
fn make(
    machine: &MachineSpec,
    memory: &GuestMemory,
    files: Vec<File>,
    host: &HostSide,
) -> Result<Vec<Box<dyn Device>>, Error> {
    if files.len() != machine.disks.len() + usize::from(machine.network.is_some()) {
        return Err(Error::Refused("one file per disk is needed, and one for the network if there is one"));
    }
    let mut files = files.into_iter();
    let mut devices: Vec<Box<dyn Device>> = Vec::new();
    let sources_of = |index| Sources::new(Arc::clone(&host.watch), index);
    for (disk, file) in machine.disks.iter().zip(files.by_ref()) {
        let sources = sources_of(devices.len());
        let limiter = disk.rate.map(|rate| Limiter::new(rate, &sources, 0)).transpose()?;
        devices.push(Box::new(Block::new(file, disk.read_only, limiter)?));
    }
    devices.push(Box::new(Vsock::new(Arc::clone(&host.watch))));
    if let Some((network, tap)) = machine.network.as_ref().zip(files.next()) {
        devices.push(Box::new(Net::new(tap, network, sources_of(devices.len()))?));
    }
    if machine.rng {
        devices.push(Box::new(Entropy::new()));
    }
    if machine.balloon {
        devices.push(Box::new(Balloon::new(Discard::new(memory)?)));
    }
    Ok(devices)
}

/// How many queues each device of a machine has, in the devices' order.
pub(super) fn queues(machine: &MachineSpec) -> Vec<usize> {
    let optional =
        [(machine.network.is_some(), net::QUEUES), (machine.rng, rng::QUEUES), (machine.balloon, balloon::QUEUES)];
    let optional = optional.into_iter().filter_map(|(there, queues)| there.then_some(queues));
    machine.disks.iter().map(|_| block::QUEUES).chain([vsock::QUEUES]).chain(optional).collect()
}

/// Where the registers of the n-th device are.
pub(super) fn registers_of(index: usize) -> u64 {
    layout::MMIO_BASE + index as u64 * layout::MMIO_SIZE
}

/// Where a kernel with ACPI is told that they are.
pub(super) fn found(machine: &MachineSpec) -> Vec<Found> {
    let one = |(index, line)| Found { registers: registers_of(index), line };
    layout::DEVICE_IRQS.into_iter().take(queues(machine).len()).enumerate().map(one).collect()
}

/// How a kernel without ACPI finds the devices (Documentation/admin-guide/kernel-parameters.txt, `virtio_mmio.device`).
pub(super) fn on_cmdline(machine: &MachineSpec) -> String {
    let one = |at: &Found| format!(" virtio_mmio.device=4K@{:#x}:{}", at.registers, at.line);
    found(machine).iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use stasis_vmm_api::{Disk, Network};

    #[test]
    fn what_is_added_moves_no_other_device() {
        let few = MachineSpec { disks: vec![Disk::default(); 2], ..Default::default() };
        assert_eq!(
            on_cmdline(&few),
            " virtio_mmio.device=4K@0xd0000000:5 virtio_mmio.device=4K@0xd0001000:6 virtio_mmio.device=4K@0xd0002000:7"
        );
        let network = Some(Network { mac: [2, 0, 0, 0, 0, 1], rate: None });
        let all = MachineSpec { network, rng: true, balloon: true, ..few.clone() };
        let more = on_cmdline(&all);
        assert!(more.starts_with(&on_cmdline(&few)));
        assert!(more.ends_with(" virtio_mmio.device=4K@0xd0005000:11"), "{more}");
        assert_eq!((queues(&few).len(), queues(&all).len()), (3, 6));
        let lines: std::collections::BTreeSet<_> = layout::DEVICE_IRQS.into_iter().collect();
        assert_eq!(lines.len(), layout::DEVICE_IRQS.len());
        assert!(lines.iter().all(|line| *line < 16 && ![0, 1, 2, layout::SERIAL_IRQ, 8, 13].contains(line)));
    }
}
