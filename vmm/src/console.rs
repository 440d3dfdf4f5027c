//! The serial port: what the guest writes ends in a ring of its last 16 KiB.

use std::{
    collections::VecDeque,
    io::{self, Write},
    sync::{Arc, Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};
use vm_superio::{Serial, SerialState, Trigger, serial::NoEvents};
use vmm_sys_util::eventfd::EventFd;

use crate::error::Error;

/// Bytes kept.
const CAPACITY: usize = 16 * 1024;

/// The last bytes that the guest wrote. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Ring(Arc<Mutex<VecDeque<u8>>>);

impl Ring {
    /// What is kept, as text.
    pub(crate) fn tail(&self) -> String {
        let ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (front, back) = ring.as_slices();
        String::from_utf8_lossy(&[front, back].concat()).into_owned()
    }
}

impl Write for Ring {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ring.extend(bytes);
        let excess = ring.len().saturating_sub(CAPACITY);
        ring.drain(..excess);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Raises the port's interrupt.
pub(crate) struct Line(Arc<EventFd>);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// The serial port.
pub(crate) struct Console {
    port: Serial<Line, NoEvents, Ring>,
    ring: Ring,
    interrupt: Arc<EventFd>,
}

impl Console {
    /// A port in its state after power-on. `interrupt` is wired to the port's line.
    pub(crate) fn new(interrupt: EventFd) -> Self {
        let (ring, interrupt) = (Ring::default(), Arc::new(interrupt));
        let port = Serial::new(Line(Arc::clone(&interrupt)), ring.clone());
        Self { port, ring, interrupt }
    }

    /// A saved state instead of the present one; what the guest wrote is forgotten.
    pub(crate) fn restore(&mut self, state: &ConsoleState) -> Result<(), Error> {
        let (ring, line) = (Ring::default(), Line(Arc::clone(&self.interrupt)));
        self.port = Serial::from_state(&state.to_serial(), line, NoEvents, ring.clone())
            .map_err(|error| Error::Snapshot(format!("serial port: {error:?}")))?;
        self.ring = ring;
        Ok(())
    }

    pub(crate) fn ring(&self) -> &Ring {
        &self.ring
    }

    pub(crate) fn read(&mut self, offset: u8) -> u8 {
        self.port.read(offset)
    }

    pub(crate) fn write(&mut self, offset: u8, value: u8) {
        // The ring takes every byte, so this fails only when the interrupt's counter overflows: it is pending already.
        if let Err(error) = self.port.write(offset, value) {
            tracing::debug!(?error, "serial port");
        }
    }

    pub(crate) fn state(&self) -> ConsoleState {
        ConsoleState::of(&self.port.state())
    }
}

/// The port's registers, as a snapshot keeps them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ConsoleState {
    registers: [u8; 9],
    in_buffer: Vec<u8>,
}

impl ConsoleState {
    fn of(state: &SerialState) -> Self {
        let registers = [
            state.baud_divisor_low,
            state.baud_divisor_high,
            state.interrupt_enable,
            state.interrupt_identification,
            state.line_control,
            state.line_status,
            state.modem_control,
            state.modem_status,
            state.scratch,
        ];
        Self { registers, in_buffer: state.in_buffer.clone() }
    }

    fn to_serial(&self) -> SerialState {
        let [
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
        ] = self.registers;
        SerialState {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
            in_buffer: self.in_buffer.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_keeps_the_end() {
        let mut ring = Ring::default();
        for line in 0..4000 {
            writeln!(ring, "line {line}").unwrap();
        }
        let tail = ring.tail();
        assert!(tail.len() == CAPACITY && tail.ends_with("line 3999\n") && !tail.contains("line 1\n"));
    }

    #[test]
    fn registers_survive_a_snapshot() {
        let mut console = Console::new(EventFd::new(0).unwrap());
        console.write(1, 0x05);
        console.write(7, 0xa5);
        console.write(0, b'x');
        let state = console.state();
        let mut restored = Console::new(EventFd::new(0).unwrap());
        for byte in *b"of another guest" {
            restored.write(0, byte);
        }
        restored.restore(&state).unwrap();
        assert_eq!((restored.read(1), restored.read(7)), (0x05, 0xa5));
        assert_eq!((console.ring().tail().as_str(), restored.state()), ("x", state));
    }
}
