//! Kernels of a few instructions.

/// Where they are loaded, and entered.
pub(crate) const ENTRY: u64 = 0x10_0000;
/// Where the counting one counts.
pub(crate) const COUNTER: u64 = 0x20_0000;

/// Where the device of the reading one counts what it has answered.
pub(crate) const USED_INDEX: u64 = 0x10_3002;

/// An ELF executable of one segment at [`ENTRY`].
pub(crate) fn elf(code: &[u8]) -> Vec<u8> {
    const HEADERS: u64 = 64 + 56;
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    file.extend([2u16, 62].map(u16::to_le_bytes).concat()); // an executable for x86-64
    file.extend(1u32.to_le_bytes());
    file.extend([ENTRY, 64, 0].map(u64::to_le_bytes).concat()); // entry, program headers, section headers
    file.extend(0u32.to_le_bytes());
    file.extend([64u16, 56, 1, 64, 0, 0].map(u16::to_le_bytes).concat());
    file.extend([1u32, 7].map(u32::to_le_bytes).concat()); // PT_LOAD, all rights
    let size = code.len() as u64;
    file.extend([HEADERS, ENTRY, ENTRY, size, size, 0x1000].map(u64::to_le_bytes).concat());
    file.extend(code);
    file
}

/// Prints "ok", then pulses the reset line.
pub(crate) fn say_ok() -> Vec<u8> {
    elf(&[
        0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xb0, b'o', 0xee, // mov al, 'o'; out dx, al
        0xb0, b'k', 0xee, // mov al, 'k'; out dx, al
        0x66, 0xba, 0x64, 0x00, // mov dx, 0x64
        0xb0, 0xfe, 0xee, // mov al, 0xfe; out dx, al
        0xeb, 0xfe, // jmp $
    ])
}

/// Counts at [`COUNTER`]; prints every 256th number as sixteen letters, `a` for 0 to `p` for 15.
pub(crate) fn count() -> Vec<u8> {
    elf(&[
        0x48, 0xc7, 0xc3, 0x00, 0x00, 0x20, 0x00, // mov rbx, COUNTER
        0x48, 0xff, 0x03, // 1: inc qword [rbx]
        0x48, 0x8b, 0x0b, // mov rcx, [rbx]
        0xf7, 0xc1, 0xff, 0x00, 0x00, 0x00, // test ecx, 0xff
        0x75, 0xf2, // jnz 1b
        0xbf, 0x10, 0x00, 0x00, 0x00, // mov edi, 16
        0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0x48, 0xc1, 0xc1, 0x04, // 2: rol rcx, 4
        0x88, 0xc8, // mov al, cl
        0x24, 0x0f, // and al, 15
        0x04, 0x61, // add al, 'a'
        0xee, // out dx, al
        0xff, 0xcf, // dec edi
        0x75, 0xf1, // jnz 2b
        0xb0, 0x0a, 0xee, // mov al, '\n'; out dx, al
        0xeb, 0xd5, // jmp 1b
    ])
}

/// The numbers that [`count`] printed, whole lines only.
pub(crate) fn counted(console: &str) -> Vec<u64> {
    let number = |line: &str| line.bytes().fold(0, |sum, letter| sum << 4 | u64::from(letter - b'a'));
    let whole = console.rfind('\n').map_or("", |end| &console[..end]);
    whole.lines().filter(|line| line.len() == 16).map(number).collect()
}

/// Prints the alphabet again and again, four at a time by one instruction.
pub(crate) fn alphabet() -> Vec<u8> {
    let code = [
        0xfc, // cld
        0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0x48, 0x8d, 0x35, 0x09, 0x00, 0x00, 0x00, // 1: lea rsi, [rip + text]
        0xb9, 0x68, 0x00, 0x00, 0x00, // mov ecx, 104
        0xf3, 0x6e, // rep outsb
        0xeb, 0xf0, // jmp 1b
    ];
    elf(&[&code[..], &b"abcdefghijklmnopqrstuvwxyz".repeat(4)].concat())
}

/// A driver of the first disk: reads its first sector again and again without an interrupt, and prints the first byte each time.
pub(crate) fn read_disk() -> Vec<u8> {
    // Registers of virtio-mmio, and what the driver writes there.
    const SETUP: [(u32, u32); 14] = [
        (0x70, 3),         // acknowledged, driver
        (0x24, 1),         // the upper half of the features:
        (0x20, 1),         // VIRTIO_F_VERSION_1
        (0x70, 11),        // features accepted
        (0x30, 0),         // queue 0
        (0x38, 16),        // of 16 entries
        (0x80, 0x10_1000), // descriptors
        (0x84, 0),
        (0x90, 0x10_2000), // available ring
        (0x94, 0),
        (0xa0, 0x10_3000), // used ring
        (0xa4, 0),
        (0x44, 1),  // ready
        (0x70, 15), // driver ready
    ];
    let mut code = vec![
        0x48, 0xc7, 0x04, 0x25, 0x18, 0xa0, 0x00, 0x00, 0x03, 0xc0, 0x00,
        0x00, // the fourth GiB's page directory at 0xc000,
        0xc7, 0x04, 0x25, 0x00, 0xc4, 0x00, 0x00, 0x83, 0x00, 0x00, 0xd0, // and in it the devices' page
        0xbb, 0x00, 0x00, 0x00, 0xd0, // mov ebx, the first device
    ];
    for (register, value) in SETUP {
        code.extend([0xc7, 0x83]); // mov dword [rbx + register], value
        code.extend([register, value].map(u32::to_le_bytes).concat());
    }
    code.extend([
        0x66, 0xff, 0x04, 0x25, 0x02, 0x20, 0x10, 0x00, // 1: inc word [available index]
        0xc7, 0x83, 0x50, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, // notify queue 0
        0x66, 0x8b, 0x04, 0x25, 0x02, 0x20, 0x10, 0x00, // 2: mov ax, [available index]
        0x66, 0x3b, 0x04, 0x25, 0x02, 0x30, 0x10, 0x00, // cmp ax, [used index]
        0x75, 0xee, // jne 2b
        0x8a, 0x04, 0x25, 0x00, 0x50, 0x10, 0x00, // mov al, [data]
        0x66, 0xba, 0xf8, 0x03, 0xee, // mov dx, 0x3f8; out dx, al
        0xeb, 0xce, // jmp 1b
    ]);
    let mut image = vec![0; 0x6000];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &code);
    // Header (a read of sector 0 is all zeros), data, status: every entry of the available ring is descriptor 0.
    let chain = [(0x10_4000_u64, 16_u32, 1_u16, 1_u16), (0x10_5000, 512, 3, 2), (0x10_4010, 1, 2, 0)];
    for (index, (address, length, flags, next)) in chain.into_iter().enumerate() {
        let head = [&address.to_le_bytes()[..], &length.to_le_bytes()].concat();
        put(0x1000 + index * 16, &[head, [flags, next].map(u16::to_le_bytes).concat()].concat());
    }
    elf(&image)
}
