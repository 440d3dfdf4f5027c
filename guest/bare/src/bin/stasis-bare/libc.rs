//! What the compiler calls by these names, and a C library would have.

use core::arch::asm;

use crate::ports;

/// Copies `count` bytes that do not overlap.
///
/// # Safety
/// As C's `memcpy`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    // SAFETY: the caller says that both ranges are valid and apart; the direction flag is clear, as the ABI says.
    unsafe {
        asm!("rep movsb", inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack, preserves_flags));
    }
    to
}

/// Copies `count` bytes that may overlap.
///
/// # Safety
/// As C's `memmove`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, count: usize) -> *mut u8 {
    if to.addr().wrapping_sub(from.addr()) >= count {
        // SAFETY: copied upwards, a byte is read before it can be overwritten: `to` is below `from`, or behind its end.
        return unsafe { memcpy(to, from, count) };
    }
    // SAFETY: copied downwards, from the last byte, for `to` is inside of `from`'s range. The flag is put back.
    unsafe {
        asm!(
            "std", "rep movsb", "cld",
            inout("rcx") count => _,
            inout("rdi") to.wrapping_add(count).wrapping_sub(1) => _,
            inout("rsi") from.wrapping_add(count).wrapping_sub(1) => _,
            options(nostack),
        );
    }
    to
}

/// Fills `count` bytes.
///
/// # Safety
/// As C's `memset`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, count: usize) -> *mut u8 {
    // SAFETY: the caller says that the range is valid; the direction flag is clear, as the ABI says.
    unsafe {
        asm!("rep stosb", inout("rcx") count => _, inout("rdi") to => _, in("al") byte.to_le_bytes()[0], options(nostack, preserves_flags));
    }
    to
}

/// Compares `count` bytes.
///
/// # Safety
/// As C's `memcmp`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(one: *const u8, other: *const u8, count: usize) -> i32 {
    for at in 0..count {
        // Volatile, or the compiler would see a comparison of memory here and call this function.
        // SAFETY: the caller says that both ranges have `count` bytes.
        let a = unsafe { one.wrapping_add(at).read_volatile() };
        // SAFETY: as above.
        let b = unsafe { other.wrapping_add(at).read_volatile() };
        if a != b {
            return i32::from(a) - i32::from(b);
        }
    }
    0
}

/// Whether `count` bytes differ.
///
/// # Safety
/// As C's `bcmp`.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(one: *const u8, other: *const u8, count: usize) -> i32 {
    // SAFETY: the caller's promise is the same.
    unsafe { memcmp(one, other, count) }
}

/// Referred to by the compiled standard libraries, which can unwind; a panic here ends the machine, so nothing ever calls it.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() -> ! {
    ports::end("an exception was raised")
}

/// As [`rust_eh_personality`].
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    ports::end("an exception went on")
}
