//! A list of system calls as a program of the kernel (classic BPF, `linux/filter.h`).
//!
//! It searches instead of going through the list. That is not for the calls alone: at its installation the kernel runs it once for each system call
//! that there is, and translates it, which with a chain of comparisons was a tenth of the processor time of a VM's whole life.

use std::collections::BTreeMap;

use libc::{BPF_ABS, BPF_JEQ, BPF_JGE, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W};
use seccompiler::sock_filter;

use crate::error::Error;

/// Which of a system call's forms are allowed. Arguments are looked at in their lower 32 bits, which is all that the kernel takes of those that are
/// compared here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Allowed {
    /// All.
    Any,
    /// Those with one of these values in this argument.
    OneOf { argument: u8, values: Vec<u32> },
    /// Those with none of these bits in this argument.
    Without { argument: u8, bits: u32 },
}

/// A list: system calls by their numbers.
pub(super) type List = BTreeMap<u32, Allowed>;
type Program = Vec<sock_filter>;

/// `AUDIT_ARCH_X86_64` (`linux/audit.h`).
const X86_64: u32 = 0xc000_003e;
/// Where the kernel shows the number of the call, the architecture, and the arguments (`struct seccomp_data`, `linux/seccomp.h`).
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;
/// How many keys are compared one after the other.
const AT_ONCE: usize = 4;

/// The program that allows what is in `list`, and kills the process for the rest: other architectures' calls among it.
///
/// # Errors
/// [`Error::Jail`] where the list is so long that the kernel's jumps cannot cross a part of it.
pub(super) fn compile(list: &List) -> Result<Program, Error> {
    let mut keys = Vec::new();
    for (number, allowed) in list {
        let then = match allowed {
            Allowed::Any => None,
            Allowed::OneOf { argument, values } => {
                let mut values = values.clone();
                values.sort_unstable();
                values.dedup();
                let values: Vec<_> = values.into_iter().map(|value| (value, None)).collect();
                Some([vec![load(argument_at(*argument))], search(&values)?].concat())
            }
            Allowed::Without { argument, bits } => {
                Some(vec![load(argument_at(*argument)), jump(BPF_JSET, *bits, 1, 0), allow(), kill()])
            }
        };
        keys.push((*number, then));
    }
    let calls = search(&keys)?;
    Ok([vec![load(ARCHITECTURE), jump(BPF_JEQ, X86_64, 1, 0), kill(), load(NUMBER)], calls].concat())
}

/// Finds what was loaded among ascending keys. Found, it is allowed, or what belongs to it is done; otherwise the process is killed.
fn search(keys: &[(u32, Option<Program>)]) -> Result<Program, Error> {
    if keys.len() <= AT_ONCE {
        return compare(keys);
    }
    let (low, high) = keys.split_at(keys.len() / 2);
    let first = high.first().map_or(u32::MAX, |(key, _)| *key);
    let (low, high) = (search(low)?, search(high)?);
    Ok([vec![jump(BPF_JGE, first, distance(low.len())?, 0)], low, high].concat())
}

fn compare(keys: &[(u32, Option<Program>)]) -> Result<Program, Error> {
    // From behind, since jumps lead forward only. The last instruction allows.
    let mut program = vec![kill(), allow()];
    for (key, then) in keys.iter().rev() {
        let mut step = match then {
            None => vec![jump(BPF_JEQ, *key, distance(program.len() - 1)?, 0)],
            Some(then) => {
                let mut step = vec![jump(BPF_JEQ, *key, 0, distance(then.len())?)];
                step.extend_from_slice(then);
                step
            }
        };
        step.append(&mut program);
        program = step;
    }
    Ok(program)
}

fn argument_at(index: u8) -> u32 {
    ARGUMENTS + 8 * u32::from(index)
}

fn distance(instructions: usize) -> Result<u8, Error> {
    u8::try_from(instructions).map_err(|_| Error::Jail("a list of system calls is too long for the kernel's jumps"))
}

fn load(at: u32) -> sock_filter {
    instruction(BPF_LD | BPF_W | BPF_ABS, at, 0, 0)
}

fn jump(condition: u32, than: u32, if_so: u8, otherwise: u8) -> sock_filter {
    instruction(BPF_JMP | condition | BPF_K, than, if_so, otherwise)
}

fn allow() -> sock_filter {
    instruction(BPF_RET | BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0)
}

fn kill() -> sock_filter {
    instruction(BPF_RET | BPF_K, libc::SECCOMP_RET_KILL_PROCESS, 0, 0)
}

#[allow(clippy::cast_possible_truncation, reason = "an operation's code has 8 bits")]
fn instruction(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: code as u16, jt, jf, k }
}

#[cfg(test)]
mod tests;
