//! Which devices a machine has, in which order, on which lines and registers.

use std::{
    fs::File,
    sync::{Arc, Mutex},
};

use kvm_ioctls::{IoEventAddress, VmFd};
use stasis_vmm_api::MachineSpec;
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::{HostSide, Phase, Vm};
use crate::{
    bus::lock,
    error::{Error, Host, Ioctl},
    layout,
    memory::{GuestMemory, discard::Discard},
    virtio::{
        Device, Transport, balloon::Balloon, block::Block, net::Net, rate_limit::Limiter, rng::Entropy, vsock::Vsock,
        watch::Sources,
    },
};

/// The devices of a VM.
pub(super) struct Devices {
    pub(super) virtio: Vec<Arc<Mutex<Transport>>>,
    pub(super) notifications: Vec<Notification>,
    /// Which of them is vsock.
    pub(super) vsock: usize,
}

/// The guest has put something into a queue of a device.
pub(crate) struct Notification {
    pub(crate) event: EventFd,
    pub(crate) device: usize,
    pub(crate) queue: usize,
}

impl Notification {
    /// Comes back to it, after everything else that waits.
    pub(super) fn again(&self) -> Result<(), Error> {
        self.event.write(1).host("write to a notification's eventfd")
    }
}

impl Devices {
    /// Makes the devices and puts them on their lines and registers.
    pub(super) fn assemble(
        fd: &VmFd,
        machine: &MachineSpec,
        memory: &GuestMemory,
        files: Vec<File>,
        host: &HostSide,
    ) -> Result<Self, Error> {
        if count(machine) > layout::DEVICE_IRQS.len() {
            return Err(Error::Refused("too many devices"));
        }
        let mut virtio = Vec::new();
        let mut notifications = Vec::new();
        let devices = make(machine, memory, files, host)?;
        for (index, (device, irq)) in devices.into_iter().zip(layout::DEVICE_IRQS).enumerate() {
            let transport = Transport::new(device, memory.clone(), interrupt(fd, irq)?)?;
            for queue in 0..transport.queue_count() {
                let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).host("eventfd")?;
                let register = registers_of(index) + u64::from(VIRTIO_MMIO_QUEUE_NOTIFY);
                let value = u32::try_from(queue).unwrap_or_default();
                fd.register_ioevent(&event, &IoEventAddress::Mmio(register), value).ioctl("KVM_IOEVENTFD")?;
                notifications.push(Notification { event, device: index, queue });
            }
            virtio.push(Arc::new(Mutex::new(transport)));
        }
        Ok(Self { virtio, notifications, vsock: machine.disks.len() })
    }
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

/// How many devices a machine has.
fn count(machine: &MachineSpec) -> usize {
    let optional = [machine.network.is_some(), machine.rng, machine.balloon];
    machine.disks.len() + 1 + optional.into_iter().filter(|there| *there).count()
}

/// An interrupt line of the VM, as an eventfd.
pub(super) fn interrupt(vm: &VmFd, line: u32) -> Result<EventFd, Error> {
    let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).host("eventfd")?;
    vm.register_irqfd(&event, line).ioctl("KVM_IRQFD")?;
    Ok(event)
}

/// Where the registers of the n-th device are.
fn registers_of(index: usize) -> u64 {
    layout::MMIO_BASE + index as u64 * layout::MMIO_SIZE
}

/// How the kernel finds the devices (Documentation/admin-guide/kernel-parameters.txt, `virtio_mmio.device`).
pub(super) fn on_cmdline(machine: &MachineSpec) -> String {
    let one = |(index, irq)| format!(" virtio_mmio.device=4K@{:#x}:{irq}", registers_of(index));
    layout::DEVICE_IRQS.into_iter().take(count(machine)).enumerate().map(one).collect()
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
        assert_eq!((count(&few), count(&all)), (3, 6));
        let lines: std::collections::BTreeSet<_> = layout::DEVICE_IRQS.into_iter().collect();
        assert_eq!(lines.len(), layout::DEVICE_IRQS.len());
        assert!(lines.iter().all(|line| *line < 16 && ![0, 1, 2, layout::SERIAL_IRQ, 8, 13].contains(line)));
    }
}
