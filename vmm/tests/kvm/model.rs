//! Random histories of VMs, against a model that knows what every page must hold.
//!
//! The guest lives in epochs. At the start of each it draws a seed from its clock, which makes every VM's history its own, and prints it; then
//! it writes 64 pages, chosen and filled by the seed's sequence. Who has read the seeds knows all of memory, at every moment.

use std::{fs::File, rc::Rc};

use proptest::{prelude::*, test_runner::Config};
use stasis_vmm_api::{Event, Reply, Request};

use crate::{
    contents,
    guest::counted,
    kvm,
    live::clone_of,
    reopened, snapshot,
    vmm::{Vmm, machine},
};

/// Where the guest keeps its epoch, the sequence's last number, the steps done, the seed: eight bytes each.
const CONTROL: usize = 0x18_0000;
const DATA: usize = 0x20_0000;
const PAGE: usize = 4096;
const PAGES: usize = 1024;
const STEPS: u64 = 64;
/// VMs at a time.
const MOST: usize = 4;

#[rustfmt::skip]
const GUEST: [u8; 158] = [
    b'S', b'T', b'A', b'S', b'F', b'L', b'A', b'T', // entered behind this
    0x48, 0xc7, 0xc3, 0x00, 0x00, 0x18, 0x00, // mov rbx, CONTROL
    0x0f, 0x31, // 1: rdtsc
    0x48, 0xc1, 0xe2, 0x20, // shl rdx, 32
    0x48, 0x09, 0xd0, // or rax, rdx
    0x48, 0x83, 0xc8, 0x01, // or rax, 1
    0x48, 0x89, 0x43, 0x08, // mov [rbx + 8], rax
    0x48, 0x89, 0x43, 0x18, // mov [rbx + 24], rax
    0x48, 0xc7, 0x43, 0x10, 0x00, 0x00, 0x00, 0x00, // mov qword [rbx + 16], 0
    0x48, 0xff, 0x03, // inc qword [rbx]
    0x48, 0x89, 0xc1, // mov rcx, rax
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
    0x48, 0x8b, 0x43, 0x08, // 3: mov rax, [rbx + 8]
    0x48, 0x89, 0xc1, // mov rcx, rax
    0x48, 0xc1, 0xe1, 0x0d, // shl rcx, 13
    0x48, 0x31, 0xc8, // xor rax, rcx
    0x48, 0x89, 0xc1, // mov rcx, rax
    0x48, 0xc1, 0xe9, 0x07, // shr rcx, 7
    0x48, 0x31, 0xc8, // xor rax, rcx
    0x48, 0x89, 0xc1, // mov rcx, rax
    0x48, 0xc1, 0xe1, 0x11, // shl rcx, 17
    0x48, 0x31, 0xc8, // xor rax, rcx
    0x89, 0xc1, // mov ecx, eax
    0x81, 0xe1, 0xff, 0x03, 0x00, 0x00, // and ecx, 1023
    0xc1, 0xe1, 0x0c, // shl ecx, 12
    0x48, 0x89, 0x81, 0x00, 0x00, 0x20, 0x00, // mov [rcx + DATA], rax
    0x48, 0x89, 0x43, 0x08, // mov [rbx + 8], rax
    0x48, 0xff, 0x43, 0x10, // inc qword [rbx + 16]
    0x48, 0x83, 0x7b, 0x10, 0x40, // cmp qword [rbx + 16], STEPS
    0x72, 0xbd, // jb 3b
    0xb9, 0x00, 0x00, 0x00, 0x01, // mov ecx, 16 Mi: some milliseconds, so that the console keeps every seed
    0xff, 0xc9, // 4: dec ecx
    0x75, 0xfc, // jnz 4b
    0xe9, 0x71, 0xff, 0xff, 0xff, // jmp 1b
];

/// What a VM's memory holds.
#[derive(Debug, Clone, PartialEq)]
struct Model {
    /// The epoch that has begun last, and its seed.
    epoch: u64,
    seed: u64,
    /// The pages' first words as they were when it began.
    pages: Vec<u64>,
}

impl Model {
    fn new() -> Self {
        Self { epoch: 0, seed: 0, pages: vec![0; PAGES] }
    }

    /// The next epoch begins.
    fn begin(&mut self, seed: u64) {
        // Before the first there is none that could have written.
        if self.epoch > 0 {
            self.pages = self.after(STEPS);
        }
        (self.epoch, self.seed) = (self.epoch + 1, seed);
    }

    /// The pages when so many steps of the epoch are done.
    fn after(&self, steps: u64) -> Vec<u64> {
        let mut pages = self.pages.clone();
        let mut number = self.seed;
        for _ in 0..steps {
            number ^= number << 13;
            number ^= number >> 7;
            number ^= number << 17;
            pages[usize::try_from(number & 1023).unwrap()] = number;
        }
        pages
    }

    /// Takes in what a console has, up to an epoch. Lines of a whole seed are taken; one that was begun before a snapshot is not whole behind it.
    fn read(&mut self, console: &str, up_to: u64) {
        let seeds = counted(console);
        let known = seeds.iter().rposition(|seed| *seed == self.seed).map_or(0, |at| at + 1);
        for seed in &seeds[known..] {
            if self.epoch < up_to {
                self.begin(*seed);
            }
        }
    }

    /// That an image is of this history, whose last line may not be whole yet; the model of its moment.
    fn check(&mut self, image: &[u8]) {
        let word = |at: usize| u64::from_le_bytes(image[at..at + 8].try_into().unwrap());
        let (epoch, steps, seed) = (word(CONTROL), word(CONTROL + 16), word(CONTROL + 24));
        if epoch == self.epoch + 1 {
            self.begin(seed);
        }
        assert_eq!(epoch, self.epoch, "epochs are missing, or too many");
        // A seed is drawn before its epoch begins.
        let steps = if epoch == 0 {
            0
        } else if seed == self.seed {
            steps
        } else {
            STEPS
        };
        let (done, next) = (self.after(steps), self.after((steps + 1).min(STEPS)));
        for page in 0..PAGES {
            let at = DATA + page * PAGE;
            assert!([done[page], next[page]].contains(&word(at)), "page {page} of epoch {epoch}, step {steps}");
            assert!(image[at + 8..at + PAGE].iter().all(|byte| *byte == 0), "page {page} beyond its first word");
        }
        let missing = (0..PAGES).filter(|page| word(DATA + page * PAGE) != done[*page]).count();
        assert!(missing <= 1, "{missing} pages are a step ahead");
    }
}

/// A snapshot, and what it holds.
struct Moment {
    image: File,
    state: File,
    model: Model,
}

struct Branch {
    vmm: Vmm,
    /// What it was restored from.
    from: Rc<Moment>,
    model: Model,
}

impl Branch {
    fn restore(kvm: &File, from: &Rc<Moment>) -> Self {
        let mut vmm = Vmm::start();
        let files = vec![kvm.try_clone().unwrap(), from.image.try_clone().unwrap(), reopened(&from.state)];
        let reply = vmm.restore(machine(1), files);
        assert!(matches!(reply, Reply::Built(_)), "{reply:?}");
        Self { vmm, from: from.clone(), model: from.model.clone() }
    }

    /// Some epochs more.
    fn run(&mut self) {
        self.vmm.done(&Request::Resume);
        let before = counted(&self.vmm.console()).last().copied();
        let goes_on = |seeds: &[u64]| match seeds.iter().rposition(|seed| Some(*seed) == before) {
            Some(at) => seeds.len() > at + 2,
            None => seeds.len() > 2,
        };
        self.vmm.console_until(|tail| goes_on(&counted(tail)));
    }

    /// Pauses it, and takes note of what it did.
    fn pause(&mut self) {
        self.vmm.done(&Request::Pause);
        let console = self.vmm.console();
        self.model.read(&console, u64::MAX);
    }

    fn snapshot(&mut self) -> Moment {
        self.pause();
        let (image, state) = (clone_of(&self.from.image), tempfile::tempfile().unwrap());
        let reply = self.vmm.ask(&Request::Snapshot, vec![image.try_clone().unwrap(), reopened(&state)]);
        assert!(matches!(reply, Reply::Snapshotted(_)), "{reply:?}");
        self.model.check(&contents(&image));
        Moment { image, state, model: self.model.clone() }
    }

    /// A live snapshot; its epoch is found in it, and the history up to there on the console.
    fn fork(&mut self) -> Moment {
        self.run();
        let (image, state) = (clone_of(&self.from.image), tempfile::tempfile().unwrap());
        let files = vec![image.try_clone().unwrap(), reopened(&state)];
        assert_eq!(self.vmm.ask(&Request::LiveSnapshot, files), Reply::Done);
        let event = self.vmm.event();
        assert!(matches!(event, Event::LiveSnapshot(_)), "{event:?}");
        let bytes = contents(&image);
        let epoch = u64::from_le_bytes(bytes[CONTROL..CONTROL + 8].try_into().unwrap());
        let mut model = self.model.clone();
        let console = self.vmm.console();
        model.read(&console, epoch);
        model.check(&bytes);
        Moment { image, state, model }
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Run,
    /// A snapshot in a pause, and a second VM of it.
    Snapshot,
    /// A snapshot, the process's end, and another that goes on with it.
    Hibernate,
    /// A live snapshot, and children of it.
    Fork(usize),
    Rewind,
    End,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => Just(Step::Run),
        1 => Just(Step::Snapshot),
        2 => Just(Step::Hibernate),
        2 => (1..3usize).prop_map(Step::Fork),
        2 => Just(Step::Rewind),
        1 => Just(Step::End),
    ]
}

fn take(kvm: &File, branches: &mut Vec<Branch>, which: usize, step: Step) {
    let which = which % branches.len();
    let room = MOST - branches.len();
    let branch = &mut branches[which];
    match step {
        Step::Run => {
            branch.run();
            branch.pause();
        }
        Step::Snapshot => {
            branch.run();
            let moment = Rc::new(branch.snapshot());
            if room > 0 {
                branches.push(Branch::restore(kvm, &moment));
            }
        }
        Step::Hibernate => {
            branch.run();
            let moment = Rc::new(branch.snapshot());
            std::mem::replace(branch, Branch::restore(kvm, &moment)).vmm.end();
        }
        Step::Fork(children) => {
            let moment = Rc::new(branch.fork());
            branch.pause();
            branches.extend((0..children.min(room)).map(|_| Branch::restore(kvm, &moment)));
        }
        Step::Rewind => {
            branch.run();
            let reply = branch.vmm.ask(&Request::Rewind, vec![]);
            assert!(matches!(reply, Reply::Rewound(_)), "{reply:?}");
            branch.model = branch.from.model.clone();
        }
        Step::End if branches.len() > 1 => branches.swap_remove(which).vmm.end(),
        Step::End => {}
    }
}

proptest! {
    #![proptest_config(Config { cases: 8, max_shrink_iters: 8, failure_persistence: None, ..Config::default() })]

    #[test]
    fn every_page_is_its_own_histories(steps in prop::collection::vec((0..MOST, step()), 6..14)) {
        if let Some(kvm) = kvm() {
            let mut vmm = Vmm::start();
            vmm.boot(kvm.try_clone().unwrap(), &GUEST, 1).unwrap();
            let (image, state) = snapshot(&mut vmm);
            vmm.end();
            let template = Rc::new(Moment { image, state, model: Model::new() });
            let mut branches = vec![Branch::restore(&kvm, &template)];
            for (which, step) in steps {
                take(&kvm, &mut branches, which, step);
            }
            for mut branch in branches {
                branch.run();
                branch.snapshot();
                branch.vmm.end();
            }
            assert_eq!(contents(&template.image)[DATA..], vec![0; contents(&template.image).len() - DATA], "the template is nobody's to write");
        }
    }
}
