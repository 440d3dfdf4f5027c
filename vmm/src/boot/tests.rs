use std::os::unix::fs::FileExt;

use super::*;
use crate::{guest, memory};

fn load_with(cmdline: &str, kernel: &[u8]) -> Result<(GuestMemory, GuestAddress), Error> {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all_at(kernel, 0).unwrap();
    let (memory, _) = memory::fresh(8).unwrap();
    let found = Found { registers: layout::MMIO_BASE, line: 5 };
    let entry = load(&memory, &mut file, None, cmdline, 1, &[found])?;
    Ok((memory, entry))
}

#[test]
fn the_first_gib_is_mapped_to_itself() {
    let (memory, entry) = load_with("", &guest::elf(&[0xf4])).unwrap();
    let at = |address| memory.read_obj::<u64>(GuestAddress(address)).unwrap();
    assert_eq!(entry, GuestAddress(guest::ENTRY));
    assert_eq!((at(layout::PML4), at(layout::PDPTE)), (layout::PDPTE | 3, layout::PDE | 3));
    for page in [0, 1, 511] {
        assert_eq!(at(layout::PDE + page * 8), page << 21 | 0x83);
    }
}

#[test]
fn the_zero_page_tells_of_memory_command_line_and_seed() {
    let (memory, _) = load_with("console=ttyS0 init=/x", &guest::elf(&[0xf4])).unwrap();
    let zero_page: boot_params = memory.read_obj(GuestAddress(layout::ZERO_PAGE)).unwrap();
    let entries = &zero_page.e820_table[..usize::from(zero_page.e820_entries)];
    let ranges: Vec<_> = entries.iter().map(|entry| (entry.addr, entry.addr + entry.size, entry.r#type)).collect();
    assert_eq!(ranges, [(0, 0x9_fc00, 1), (0x9_fc00, 0xa_0000, 2), (0x10_0000, 8 << 20, 1)]);
    let (at, length) = (zero_page.hdr.cmd_line_ptr, zero_page.hdr.cmdline_size);
    let mut line = vec![0; length as usize];
    memory.read_slice(&mut line, GuestAddress(at.into())).unwrap();
    assert_eq!(line, b"console=ttyS0 init=/x\0");
    let seed_at = zero_page.hdr.setup_data + 16;
    assert_ne!(memory.read_obj::<[u8; 32]>(GuestAddress(seed_at)).unwrap(), [0; 32]);
}

#[test]
fn what_does_not_fit_is_refused() {
    assert!(matches!(load_with(&"x".repeat(4096), &guest::elf(&[0xf4])), Err(Error::Cmdline(_))));
    assert!(matches!(load_with("", &guest::elf(&vec![0x90; 8 << 20])), Err(Error::Kernel(_))));
    assert!(matches!(load_with("", b"not a kernel"), Err(Error::Kernel(_))));
}
