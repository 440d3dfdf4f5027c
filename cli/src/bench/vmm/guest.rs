//! The test guest: writes some pages, tells of it, and waits.

use std::{fs::File, io, os::unix::fs::FileExt};

use anyhow::Context as _;
use stasis_vmm::limit::{LOADED_AT, MAGIC};
use stasis_vmm_api::{MachineSpec, Request};

use super::births::{Births, Vmm, from_start};

/// Guest memory of most VMs here, in MiB: that of the figures in `host-kvm.md`.
pub(super) const MEMORY_MIB: u32 = 256;

const CODE: [u8; 63] = [
    0x48, 0x8b, 0x1d, 0x38, 0x00, 0x00, 0x00, // 0: mov rbx, [rip + pages]
    0xbf, 0x00, 0x00, 0x20, 0x00, // mov edi, 2 MiB
    0x48, 0x85, 0xdb, // 1: test rbx, rbx
    0x74, 0x0f, // jz 2f
    0x48, 0x89, 0x1f, // mov [rdi], rbx
    0x48, 0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add rdi, 4096
    0x48, 0xff, 0xcb, // dec rbx
    0xeb, 0xec, // jmp 1b
    0x66, 0xba, 0x64, 0x00, // 2: mov dx, 0x64
    0x8a, 0x05, 0x1d, 0x00, 0x00, 0x00, // mov al, [rip + command]
    0xee, // out dx, al
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xb0, DONE, // mov al, DONE
    0xee, // out dx, al
    0xf3, 0x90, // 3: pause
    0x80, 0x3d, 0x0d, 0x00, 0x00, 0x00, 0x00, // cmp byte [rip + again], 0
    0x75, 0xc3, // jnz 0b
    0xeb, 0xf3, // jmp 3b
];
/// Behind the code: how many pages to write, what to tell the keyboard controller, and whether to do it all over again.
const PAGES: u64 = LOADED_AT + (MAGIC.len() + CODE.len()) as u64;
const COMMAND: u64 = PAGES + 8;
const AGAIN: u64 = COMMAND + 1;
/// The first page that it writes.
const FIRST_PAGE: u64 = 2 << 20;

/// What appears on the console when the pages are written.
pub(super) const DONE: u8 = b'k';
/// The command that ends the guest.
pub(super) const RESET: u8 = 0xfe;

/// What a guest will do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Guest {
    pub(super) memory_mib: u32,
    /// Pages that it writes.
    pub(super) pages: u64,
    /// What it then tells the keyboard controller.
    pub(super) command: u8,
    /// For ever.
    pub(super) again: bool,
}

impl Default for Guest {
    fn default() -> Self {
        Self { memory_mib: MEMORY_MIB, pages: 0, command: 0, again: false }
    }
}

impl Guest {
    pub(super) fn machine(&self) -> MachineSpec {
        MachineSpec { memory_mib: self.memory_mib, vcpus: 1, ..MachineSpec::default() }
    }
}

/// A test guest that has not run yet.
pub(super) struct Snapshot {
    pub(super) machine: MachineSpec,
    /// In which it ends itself at once.
    pub(super) image: File,
    state: File,
}

impl Snapshot {
    /// One of the usual size.
    pub(super) fn take(births: &Births) -> anyhow::Result<Self> {
        Self::of(births, Guest { command: RESET, ..Guest::default() })
    }

    pub(super) fn of(births: &Births, guest: Guest) -> anyhow::Result<Self> {
        let kernel = tempfile::tempfile()?;
        kernel.write_all_at(&[&MAGIC[..], &CODE, &[0; 10]].concat(), 0)?;
        let machine = guest.machine();
        let mut vmm = births.shell(&machine, None)?;
        vmm.expect(&Request::Boot { cmdline: String::new(), initrd: false }, &[&kernel])?;
        let (image, state) = (tempfile::tempfile()?, tempfile::tempfile()?);
        vmm.expect(&Request::Snapshot, &[&image, &state])?;
        image.write_all_at(&guest.pages.to_le_bytes(), PAGES)?;
        image.write_all_at(&[guest.command], COMMAND)?;
        image.write_all_at(&[guest.again.into()], AGAIN)?;
        Ok(Self { machine, image, state })
    }

    /// A shell that is prepared for it.
    pub(super) fn shell(&self, births: &Births) -> anyhow::Result<Vmm> {
        births.shell(&self.machine, Some(self.state()?))
    }

    /// To be read from its start.
    pub(super) fn state(&self) -> anyhow::Result<File> {
        from_start(&self.state).context("the state of the test guest")
    }

    /// What a clone of the image would be, on file systems with and without reflink.
    pub(super) fn clone_of_image(&self) -> io::Result<File> {
        let mut bytes = vec![0; usize::try_from(FIRST_PAGE).unwrap_or_default()];
        self.image.read_exact_at(&mut bytes, 0)?;
        let file = tempfile::tempfile()?;
        file.set_len(self.image.metadata()?.len())?;
        file.write_all_at(&bytes, 0)?;
        Ok(file)
    }

    /// Gives the pages that the guest will write a content, half of it random: what there is to compress in a memory.
    pub(super) fn fill(&self, pages: u64) -> io::Result<()> {
        let mut page = [0; 4096];
        for at in 0..pages {
            rustix::rand::getrandom(&mut page[..2048], rustix::rand::GetRandomFlags::empty())?;
            self.image.write_all_at(&page, FIRST_PAGE + at * 4096)?;
        }
        self.image.sync_all()
    }
}
