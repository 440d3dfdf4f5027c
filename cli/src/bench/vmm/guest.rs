//! The test guest's code: writes some pages, tells of it, and waits.

use std::{fs::File, io, os::unix::fs::FileExt};

use stasis_vmm::limit::{LOADED_AT, MAGIC};

/// Guest memory of every VM here, in MiB: that of the figures in `host-kvm.md`.
pub(super) const MEMORY_MIB: u32 = 256;

const CODE: [u8; 54] = [
    0x48, 0x8b, 0x1d, 0x2f, 0x00, 0x00, 0x00, // mov rbx, [rip + pages]
    0xbf, 0x00, 0x00, 0x20, 0x00, // mov edi, 2 MiB
    0x48, 0x85, 0xdb, // 1: test rbx, rbx
    0x74, 0x0f, // jz 2f
    0x48, 0x89, 0x1f, // mov [rdi], rbx
    0x48, 0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add rdi, 4096
    0x48, 0xff, 0xcb, // dec rbx
    0xeb, 0xec, // jmp 1b
    0x66, 0xba, 0x64, 0x00, // 2: mov dx, 0x64
    0x8a, 0x05, 0x14, 0x00, 0x00, 0x00, // mov al, [rip + command]
    0xee, // out dx, al
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xb0, DONE, // mov al, DONE
    0xee, // out dx, al
    0xf3, 0x90, // 3: pause
    0xeb, 0xfc, // jmp 3b
];
/// Behind the code: how many pages to write, and what to tell the keyboard controller.
const PAGES: u64 = LOADED_AT + (MAGIC.len() + CODE.len()) as u64;
const COMMAND: u64 = PAGES + 8;

/// What appears on the console when the pages are written.
pub(super) const DONE: u8 = b'k';
/// The command that ends the guest.
pub(super) const RESET: u8 = 0xfe;

/// The flat image that a VMM boots.
pub(super) fn image() -> Vec<u8> {
    [&MAGIC[..], &CODE, &[0; 9]].concat()
}

/// A memory image of a VM that has not run yet, in which it will write `pages` pages and give `command`.
pub(super) fn variant(of: &File, pages: u64, command: u8) -> io::Result<File> {
    /// All that the VMM has written lies below.
    const USED: usize = 2 << 20;
    let mut bytes = vec![0; USED];
    of.read_exact_at(&mut bytes, 0)?;
    let file = tempfile::tempfile()?;
    file.set_len(u64::from(MEMORY_MIB) << 20)?;
    file.write_all_at(&bytes, 0)?;
    file.write_all_at(&pages.to_le_bytes(), PAGES)?;
    file.write_all_at(&[command], COMMAND)?;
    Ok(file)
}
