use proptest::prelude::*;

use super::*;

/// What the kernel shows a program.
#[derive(Debug, Clone, Copy)]
struct Call {
    architecture: u32,
    number: u32,
    arguments: [u64; 6],
}

impl Call {
    fn word(&self, at: u32) -> u32 {
        let low = |number: u64| u32::try_from(number & 0xffff_ffff).unwrap();
        match at {
            NUMBER => self.number,
            ARCHITECTURE => self.architecture,
            at => low(self.arguments[usize::try_from((at - ARGUMENTS) / 8).unwrap()]),
        }
    }
}

/// Runs a program as the kernel does. Returns its verdict, and how many instructions it took.
fn run(program: &Program, call: &Call) -> (u32, usize) {
    let (mut at, mut loaded, mut taken) = (0, 0, 0);
    loop {
        let sock_filter { code, jt, jf, k } = program[at].clone();
        taken += 1;
        at += 1;
        let jump = |so: bool| usize::from(if so { jt } else { jf });
        match u32::from(code) & !BPF_K {
            code if code == BPF_LD | BPF_W | BPF_ABS => loaded = call.word(k),
            code if code == BPF_JMP | BPF_JEQ => at += jump(loaded == k),
            code if code == BPF_JMP | BPF_JGE => at += jump(loaded >= k),
            code if code == BPF_JMP | BPF_JSET => at += jump(loaded & k != 0),
            code if code == BPF_RET => return (k, taken),
            code => panic!("no such instruction: {code:#x}"),
        }
    }
}

/// What a list says, read as it stands.
fn is_allowed(list: &List, call: &Call) -> bool {
    let value = |argument: u8| call.word(argument_at(argument));
    call.architecture == X86_64
        && list.get(&call.number).is_some_and(|allowed| match allowed {
            Allowed::Any => true,
            Allowed::OneOf { argument, values } => values.contains(&value(*argument)),
            Allowed::Without { argument, bits } => value(*argument) & bits == 0,
        })
}

fn verdict(list: &List, call: &Call) -> u32 {
    if is_allowed(list, call) { libc::SECCOMP_RET_ALLOW } else { libc::SECCOMP_RET_KILL_PROCESS }
}

fn allowed() -> impl Strategy<Value = Allowed> {
    let number = 0..40u32;
    prop_oneof![
        3 => Just(Allowed::Any),
        1 => (0..6u8, prop::collection::vec(number, 0..30)).prop_map(|(argument, values)| Allowed::OneOf { argument, values }),
        1 => (0..6u8, 1..64u32).prop_map(|(argument, bits)| Allowed::Without { argument, bits }),
    ]
}

fn call() -> impl Strategy<Value = Call> {
    let architecture = prop_oneof![9 => Just(X86_64), 1 => any::<u32>()];
    // The upper half is not the kernel's to look at.
    let argument = (0..40u64, prop_oneof![Just(0), Just(1u64 << 32)]).prop_map(|(low, high)| low | high);
    (architecture, 0..70u32, prop::array::uniform6(argument)).prop_map(|(architecture, number, arguments)| Call {
        architecture,
        number,
        arguments,
    })
}

proptest! {
    #[test]
    fn a_program_says_what_its_list_says(
        list in prop::collection::btree_map(0..70u32, allowed(), 0..60),
        calls in prop::collection::vec(call(), 50),
    ) {
        // Some lists of such calls are too long; none of ours is.
        if let Ok(program) = compile(&list) {
            for call in calls {
                prop_assert_eq!(run(&program, &call).0, verdict(&list, &call), "{:?}", call);
            }
        }
    }
}

#[test]
fn the_lists_in_use_are_searched_not_walked() {
    use crate::jail::calls;
    for list in [calls::vcpu(), calls::event_loop(), calls::pager(), calls::pager_watch()] {
        let list = list.unwrap().into_list();
        let program = compile(&list).unwrap();
        for number in (0..600).chain([0x4000_0000, u32::MAX]) {
            for arguments in [[0; 6], [u64::MAX; 6], [0xae80; 6]] {
                let call = Call { architecture: X86_64, number, arguments };
                let (said, taken) = run(&program, &call);
                assert_eq!(said, verdict(&list, &call), "{call:?}");
                assert!(taken < 40, "{taken} instructions for {call:?}");
            }
        }
    }
}

#[test]
fn a_list_that_jumps_cannot_cross_is_refused() {
    let long = Allowed::OneOf { argument: 0, values: (0..1000).collect() };
    assert!(compile(&List::from([(1, long)])).is_err());
}
