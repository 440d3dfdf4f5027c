//! Which device answers a vCPU's access.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{
    console::Console,
    layout,
    memory::{GuestMemory, Room},
    virtio::Transport,
    vm::Bell,
};

/// What an access led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Done,
    /// The guest pulled the reset line.
    Reset,
}

/// All devices of a VM. vCPU threads and the event loop share it; each device has its own lock.
pub(crate) struct Bus {
    pub(crate) console: Mutex<Console>,
    pub(crate) virtio: Vec<Arc<Mutex<Transport>>>,
    pub(crate) memory: GuestMemory,
    /// What `memory` is mapped in.
    pub(crate) room: Room,
    pub(crate) bell: Bell,
}

impl Bus {
    pub(crate) fn port_in(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        match (port, data) {
            (port, [byte]) if layout::SERIAL_PORTS.contains(&port) => {
                *byte = lock(&self.console).read(offset_in_serial(port));
            }
            // The i8042's input buffer is always empty, so the kernel never waits for it.
            (layout::I8042_COMMAND, [byte]) => *byte = 0,
            _ => {}
        }
    }

    pub(crate) fn port_out(&self, port: u16, data: &[u8]) -> Access {
        match (port, data) {
            (port, [byte]) if layout::SERIAL_PORTS.contains(&port) => {
                self.bell.port_out(port, *byte);
                lock(&self.console).write(offset_in_serial(port), *byte);
                Access::Done
            }
            (layout::I8042_COMMAND, [layout::I8042_RESET]) => Access::Reset,
            _ => Access::Done,
        }
    }

    pub(crate) fn mmio_read(&self, address: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some((device, offset)) = self.device_at(address) {
            lock(device).read(offset, data);
        }
    }

    pub(crate) fn mmio_write(&self, address: u64, data: &[u8]) {
        if let Some((device, offset)) = self.device_at(address) {
            lock(device).write(offset, data);
        }
    }

    fn device_at(&self, address: u64) -> Option<(&Mutex<Transport>, u64)> {
        let offset = address.checked_sub(layout::MMIO_BASE)?;
        let index = usize::try_from(offset / layout::MMIO_SIZE).ok()?;
        Some((self.virtio.get(index)?, offset % layout::MMIO_SIZE))
    }
}

fn offset_in_serial(port: u16) -> u8 {
    u8::try_from(port - layout::SERIAL_PORTS.start).unwrap_or_default()
}

/// A device's lock. A thread that panicked while it held it has already condemned the process (see `process`), so the
/// state behind a poisoned lock is only looked at to report.
pub(crate) fn lock<T>(device: &Mutex<T>) -> MutexGuard<'_, T> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}
