//! The wake page: a guest that waits for its order in memory, and is restored with the order in it.

use std::fs::File;

use stasis_vmm_api::{Event, Reply, Request, Secret};

use crate::{
    contents, kvm, reopened, snapshot,
    vmm::{Vmm, machine},
};
use stasis_guest_wire::page::WakePage;

const AT: WakePage = WakePage { address: 0x20_1000, token: 0x5ea1_ed0f_5ea1_ed0f };

/// Waits at its page, and says so, and again and again that it rests; then does `first`, answers the order with itself but for an `A` in front, and
/// rings three times.
fn waits(first: &[u8]) -> Vec<u8> {
    let mut code = vec![0x48, 0xc7, 0xc3, 0x00, 0x10, 0x20, 0x00]; // mov rbx, the page
    code.extend([0x48, 0xb8]); // mov rax, the token
    code.extend(AT.token.to_le_bytes());
    code.extend([
        0x48, 0x89, 0x03, // mov [rbx], rax
        0xc7, 0x43, 0x08, 0x01, 0x00, 0x00, 0x00, // mov dword [rbx + 8], waiting
        0x66, 0xba, 0xf8, 0x03, 0xb0, b'w', 0xee, // out 0x3f8, 'w'
        0x66, 0xba, 0xfc, 0x03, 0xb0, 0x0b, 0xee, // 1: out 0x3fc, all lines but OUT1
        0x83, 0x7b, 0x08, 0x02, // cmp dword [rbx + 8], ordered
        0x75, 0xf3, // jne 1b
    ]);
    code.extend(first);
    code.extend([
        0xc6, 0x43, 0x10, b'A', // mov byte [rbx + 16], 'A'
        0xc7, 0x43, 0x08, 0x03, 0x00, 0x00, 0x00, // mov dword [rbx + 8], answered
        0x66, 0xba, 0xfc, 0x03, 0xb0, 0x0f, 0xee, 0xee, 0xee, // out 0x3fc, all lines
        0x66, 0xba, 0xf8, 0x03, 0xb0, b'd', 0xee, // out 0x3f8, 'd'
        0xeb, 0xfe, // jmp $
    ]);
    crate::guest::elf(&code)
}

struct Template {
    kvm: File,
    image: File,
    state: File,
}

impl Template {
    /// Snapshotted while it waits. None: there is no KVM.
    fn of(kernel: &[u8]) -> Option<Self> {
        let kvm = kvm()?;
        let mut vmm = Vmm::start();
        vmm.boot(kvm.try_clone().unwrap(), kernel, 1).unwrap();
        let at = |WakePage { address, token }| Request::WakePage { address, token };
        assert!(vmm.refused(&at(AT)).contains("does not wait"), "it has not run yet");
        vmm.done(&Request::Resume);
        vmm.console_until(|tail| tail == "w");
        for _ in 0..2 {
            vmm.done(&Request::AwaitRest);
            assert_eq!(vmm.event(), Event::Rests);
        }
        // Heard once for each time: another would be the next message.
        assert!(vmm.refused(&at(AT)).contains("paused"));
        vmm.done(&Request::Pause);
        for wrong in [
            WakePage { token: 1, ..AT },
            WakePage { address: AT.address + 1, ..AT },
            WakePage { address: AT.address + 4096, ..AT },
            WakePage { address: 1 << 40, ..AT },
        ] {
            vmm.refused(&at(wrong));
        }
        vmm.done(&at(AT));
        let (image, state) = snapshot(&mut vmm);
        vmm.end();
        Some(Self { kvm, image, state })
    }

    fn restored(&self) -> Vmm {
        let mut vmm = Vmm::start();
        let files = vec![self.kvm.try_clone().unwrap(), self.image.try_clone().unwrap(), reopened(&self.state)];
        assert!(matches!(vmm.restore(machine(1), files), Reply::Built(_)));
        vmm
    }

    /// The memory of a paused VM of it.
    fn memory(&self, vmm: &mut Vmm) -> (Vec<u8>, File) {
        let (image, state) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        std::io::copy(&mut reopened(&self.image), &mut image.try_clone().unwrap()).unwrap();
        let reply = vmm.ask(&Request::Snapshot, vec![image.try_clone().unwrap(), reopened(&state)]);
        assert!(matches!(reply, Reply::Snapshotted(_)), "{reply:?}");
        (contents(&image), reopened(&state))
    }
}

fn order(vmm: &mut Vmm, text: &str) -> Reply {
    vmm.ask(&Request::Order { text: Secret(text.into()) }, vec![])
}

fn answer(vmm: &mut Vmm) -> String {
    match vmm.event() {
        Event::Answered { text } => text,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_order_is_found_at_once_answered_once_and_gone_with_the_life() {
    let Some(template) = Template::of(&waits(&[])) else { return };
    let mut vmm = template.restored();
    assert!(vmm.refused(&Request::AwaitRest).contains("booted"));
    for (life, text) in ["first-canary", "second-canary"].into_iter().enumerate() {
        assert_eq!(order(&mut vmm, text), Reply::Ordered);
        assert_eq!(order(&mut vmm, "another"), Reply::NoWakePage, "one order for a life");
        vmm.done(&Request::Resume);
        assert_eq!(answer(&mut vmm), format!("A{}", &text[1..]));
        // It has rung three times by then: this answer would not be the next message.
        vmm.console_until(|tail| tail == "d");
        assert_eq!(order(&mut vmm, "a third"), Reply::NoWakePage, "it runs");
        vmm.done(&Request::Pause);
        assert_eq!(order(&mut vmm, "a third"), Reply::NoWakePage, "it has run");
        let trace = &text.as_bytes()[1..];
        let holds = |memory: &[u8]| memory.windows(trace.len()).any(|bytes| bytes == trace);
        assert!(holds(&template.memory(&mut vmm).0), "of life {life}: this test looks in the right place");
        assert!(matches!(vmm.ask(&Request::Rewind, vec![]), Reply::Rewound(_)));
        assert!(!holds(&template.memory(&mut vmm).0), "an order outlived life {life}");
    }
    vmm.end();
}

#[test]
fn an_order_that_was_not_heard_goes_with_a_rewind_too() {
    let Some(template) = Template::of(&waits(&[])) else { return };
    let mut vmm = template.restored();
    assert_eq!(order(&mut vmm, "never run"), Reply::Ordered);
    assert!(matches!(vmm.ask(&Request::Rewind, vec![]), Reply::Rewound(_)));
    assert_eq!(order(&mut vmm, "Xgain"), Reply::Ordered);
    vmm.done(&Request::Resume);
    assert_eq!(answer(&mut vmm), "Again");
    vmm.end();
}

#[test]
fn what_is_saved_of_a_life_waits_for_no_order() {
    let Some(template) = Template::of(&waits(&[])) else { return };
    let mut vmm = template.restored();
    let (_, state) = template.memory(&mut vmm);
    vmm.end();
    // Its page says that it waits, but a sandbox's guest is woken by whoever saved it.
    let mut vmm = Template { state, ..template }.restored();
    assert_eq!(order(&mut vmm, "x"), Reply::NoWakePage);
    vmm.end();
}

#[test]
fn a_guest_may_ring_early_and_leave_anything() {
    let early = [0x66, 0xba, 0xfc, 0x03, 0xb0, 0x0f, 0xee]; // out 0x3fc, all lines
    let endless = [0xc7, 0x43, 0x0c, 0xff, 0xff, 0xff, 0xff]; // mov dword [rbx + 12], -1
    let no_text = [0xc6, 0x43, 0x11, 0xff]; // mov byte [rbx + 17], -1
    for (first, expected) in [(&early[..], "Arder"), (&endless[..], ""), (&no_text[..], "")] {
        let Some(template) = Template::of(&waits(first)) else { return };
        let mut vmm = template.restored();
        assert_eq!(order(&mut vmm, "order"), Reply::Ordered);
        vmm.done(&Request::Resume);
        assert_eq!(answer(&mut vmm), expected);
        vmm.end();
    }
}

#[test]
fn an_order_that_does_not_fit_is_refused() {
    let Some(template) = Template::of(&waits(&[])) else { return };
    let mut vmm = template.restored();
    let long = "x".repeat(stasis_guest_wire::page::LONGEST + 1);
    assert!(matches!(order(&mut vmm, &long), Reply::Failed { reason } if reason.contains("too long")));
    vmm.end();
}
