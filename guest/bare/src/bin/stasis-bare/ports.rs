//! The serial console and the reset line.

use core::arch::asm;

const SERIAL: u16 = 0x3f8;
const I8042_COMMAND: u16 = 0x64;
const I8042_RESET: u8 = 0xfe;
/// Interrupt masks of the two legacy controllers.
const PIC_MASKS: [u16; 2] = [0x21, 0xa1];

/// Says why on the console, and ends the machine.
pub(crate) fn end(why: &str) -> ! {
    say(why);
    write(I8042_COMMAND, I8042_RESET);
    loop {
        core::hint::spin_loop();
    }
}

/// Prints a line.
fn say(line: &str) {
    line.bytes().chain([b'\n']).for_each(|byte| write(SERIAL, byte));
}

/// Interrupts come by the IOAPIC only.
pub(crate) fn mask_legacy_interrupts() {
    PIC_MASKS.into_iter().for_each(|port| write(port, 0xff));
}

fn write(port: u16, byte: u8) {
    // SAFETY: this guest has the right to use I/O ports (`entry` sets IOPL 3), and a write to one touches none of its memory.
    unsafe { asm!("out dx, al", in("dx") port, in("al") byte, options(nomem, nostack, preserves_flags)) }
}
