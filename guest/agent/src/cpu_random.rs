//! The first seed of a guest's generator, from the CPU.
//!
//! A kernel that is interpreted cannot execute RDRAND (it is told that there is none), and gathers its first entropy from its own jitter
//! instead, one bit per tick of its timer: 256 ticks, in which every program that wants random numbers waits. User mode runs natively and has
//! the instruction. It counts as much as it does for a kernel that has it (`random.trust_cpu`). No secret comes of it: each wake brings entropy
//! from the host.

use std::{fs::File, io};

use crate::ioctls::{SEED, add_entropy};

/// Intel's advice: one that fails this often in a row is broken.
const TRIES: usize = 10;

/// Credits what the CPU gives to the kernel's generator; whether it gave anything.
///
/// # Errors
/// What the kernel answered.
pub fn seed_kernel() -> io::Result<bool> {
    match seed() {
        Some(seed) => add_entropy(&File::open("/dev/urandom")?, &seed).map(|()| true),
        None => Ok(false),
    }
}

/// None where the CPU has no such instruction, or a broken one.
fn seed() -> Option<[u8; SEED]> {
    if !std::arch::is_x86_feature_detected!("rdrand") {
        return None;
    }
    let mut seed = [0; SEED];
    let mut last = None;
    for word in seed.chunks_exact_mut(size_of::<u64>()) {
        // SAFETY: the CPU has RDRAND, as was just asked.
        let number = unsafe { random() }?;
        // Some CPUs say the same again and again after a suspend.
        if last.replace(number) == Some(number) {
            return None;
        }
        word.copy_from_slice(&number.to_ne_bytes());
    }
    Some(seed)
}

#[target_feature(enable = "rdrand")]
fn random() -> Option<u64> {
    let mut number = 0;
    (0..TRIES).any(|_| core::arch::x86_64::_rdrand64_step(&mut number) == 1).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_that_has_the_instruction_gives_two_seeds() {
        let has = std::arch::is_x86_feature_detected!("rdrand");
        let (one, other) = (seed(), seed());
        assert_eq!((one.is_some(), other.is_some()), (has, has));
        assert!(!has || one != other);
    }
}
