//! The flat test guest, and the limit that is measured with it.

use std::{io::Seek, os::unix::fs::FileExt};

use stasis_vmm_api::{Event, Reply, Request, Stop};

use crate::{
    kvm, reopened, snapshot,
    vmm::{Vmm, machine},
};

/// Writes a page at 2 MiB, then pulls the reset line.
const CODE: [u8; 26] = [
    b'S', b'T', b'A', b'S', b'F', b'L', b'A', b'T', // entered behind this
    0x48, 0xff, 0x04, 0x25, 0x00, 0x00, 0x20, 0x00, // inc qword [2 MiB]
    0x66, 0xba, 0x64, 0x00, // mov dx, 0x64
    0xb0, 0xfe, 0xee, // mov al, 0xfe; out dx, al
    0xf3, 0x90, 0xf4, // pause; hlt, which user mode may not
];

#[test]
fn flat_code_runs_in_user_mode_and_uses_ports() {
    let kvm = kvm_or_return!();
    let mut vmm = Vmm::start();
    vmm.boot(kvm.try_clone().unwrap(), &CODE, 1).unwrap();
    let (image, mut state) = snapshot(&mut vmm);
    vmm.end();
    for _ in 0..3 {
        let mut vmm = Vmm::start();
        let files = vec![kvm.try_clone().unwrap(), image.try_clone().unwrap(), reopened(&state)];
        assert!(matches!(vmm.restore(machine(1), files), Reply::Built(_)));
        vmm.done(&Request::Resume);
        let Event::Stopped { why, .. } = vmm.event() else { panic!() };
        assert_eq!(why, Stop::Shutdown);
        vmm.end();

        state.rewind().unwrap();
        stasis_vmm::limit::claim(kvm.try_clone().unwrap(), &image, &state).unwrap();
    }
    let mut page = [0; 8];
    image.read_exact_at(&mut page, 2 << 20).unwrap();
    assert_eq!(page, [0; 8], "the image is nobody's to write");
}
