//! The frames that a VM of a template touches until its first answer, in the order in which it does.
//!
//! ```text
//!  learning ──two lives, nothing put in ahead──▶ known: what both touched ──lives that miss much──▶ learning
//! ```
//!
//! It lies in a file beside the template, and is no more than advice: a wrong one costs time. One that is cut or altered is learnt again.

use std::{collections::BTreeSet, fs::File, os::unix::fs::FileExt};

use stasis_cow::Digest;

use crate::error::{Error, Host};

const MAGIC: [u8; 8] = *b"STASISWS";
const DIGEST: usize = 32;
/// Lives in a row that missed much, until the set is learnt again: one alone may be an odd request.
const POOR_LIVES: u32 = 3;
/// A life misses much if its faults outside the set are more than this part of the set.
const MISSED: usize = 4;

/// What is known of a template's lives.
#[derive(Debug)]
pub(super) struct WorkingSet {
    file: File,
    phase: Phase,
}

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    /// What the first of two lives touched, once it is over.
    Learning(Option<Vec<u32>>),
    Known {
        set: Vec<u32>,
        poor: u32,
    },
}

impl WorkingSet {
    /// As the file has it, for a memory of `frames` frames.
    pub(super) fn open(file: File, frames: usize) -> Result<Self, Error> {
        let length = file.metadata().host("fstat of the working set")?.len();
        // A longer one is none of ours.
        let most = MAGIC.len() + frames * 4 + DIGEST;
        let phase = match usize::try_from(length) {
            Ok(length) if length <= most => {
                let mut bytes = vec![0; length];
                file.read_exact_at(&mut bytes, 0).host("read of the working set")?;
                decode(&bytes, frames)
            }
            _ => None,
        };
        let phase = phase.map_or(Phase::Learning(None), |set| Phase::Known { set, poor: 0 });
        Ok(Self { file, phase })
    }

    /// What to put in ahead of a new VM's faults; nothing while it is learnt.
    pub(super) fn ahead(&self) -> &[u32] {
        match &self.phase {
            Phase::Learning(_) => &[],
            Phase::Known { set, .. } => set,
        }
    }

    /// A life has given its first answer: the frames that it faulted on, in this order, and whether the set was put in ahead.
    pub(super) fn lived(&mut self, touched: Vec<u32>, helped: bool) -> Result<(), Error> {
        match &mut self.phase {
            Phase::Known { set, poor } if helped => {
                *poor = if touched.len() > set.len() / MISSED { *poor + 1 } else { 0 };
                if *poor >= POOR_LIVES {
                    tracing::info!("the working set has changed and is learnt again");
                    self.phase = Phase::Learning(None);
                }
                Ok(())
            }
            // It began before the set was known, or after it was given up.
            Phase::Known { .. } => Ok(()),
            Phase::Learning(_) if helped => Ok(()),
            Phase::Learning(first @ None) => {
                *first = Some(touched);
                Ok(())
            }
            Phase::Learning(Some(first)) => {
                let too: BTreeSet<u32> = touched.into_iter().collect();
                let set: Vec<u32> = first.iter().copied().filter(|frame| too.contains(frame)).collect();
                let bytes = encode(&set);
                self.phase = Phase::Known { set, poor: 0 };
                self.file.set_len(bytes.len() as u64).host("ftruncate of the working set")?;
                self.file.write_all_at(&bytes, 0).host("write of the working set")
            }
        }
    }
}

fn encode(set: &[u32]) -> Vec<u8> {
    let body: Vec<u8> = MAGIC.into_iter().chain(set.iter().flat_map(|frame| frame.to_le_bytes())).collect();
    let digest = Digest::of(&body);
    [&body[..], digest.as_bytes()].concat()
}

fn decode(bytes: &[u8], frames: usize) -> Option<Vec<u32>> {
    let (body, digest) = bytes.split_last_chunk::<DIGEST>()?;
    if Digest::of(body).as_bytes() != digest {
        return None;
    }
    let (set, []) = body.strip_prefix(&MAGIC)?.as_chunks::<4>() else { return None };
    let set: Vec<u32> = set.iter().map(|frame| u32::from_le_bytes(*frame)).collect();
    set.iter().all(|frame| (*frame as usize) < frames).then_some(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> File {
        tempfile::tempfile().unwrap()
    }

    fn reopened(file: &File) -> WorkingSet {
        WorkingSet::open(file.try_clone().unwrap(), 100).unwrap()
    }

    #[test]
    fn what_two_lives_touched_is_put_in_in_the_first_ones_order_and_lasts() {
        let file = empty();
        let mut set = reopened(&file);
        set.lived(vec![9, 3, 50, 7], false).unwrap();
        assert!(set.ahead().is_empty());
        set.lived(vec![7, 9, 8, 3], false).unwrap();
        assert_eq!(set.ahead(), [9, 3, 7]);
        assert_eq!(reopened(&file).ahead(), [9, 3, 7]);
    }

    #[test]
    fn a_set_that_lives_no_longer_fit_is_learnt_again() {
        let file = empty();
        let mut set = reopened(&file);
        for _ in 0..2 {
            set.lived((0..20).collect(), false).unwrap();
        }
        let mut lives = |counts: [usize; 3]| {
            for count in counts {
                set.lived((50..).take(count).collect(), true).unwrap();
            }
            set.ahead().len()
        };
        assert_eq!(lives([6, 6, 0]), 20, "not in a row");
        assert_eq!(lives([5, 5, 5]), 20, "not much");
        assert_eq!(lives([6, 6, 6]), 0);
        for _ in 0..2 {
            set.lived(vec![77], true).unwrap(); // helped by the old set
            set.lived(vec![60, 61], false).unwrap();
        }
        assert_eq!(set.ahead(), [60, 61]);
        assert_eq!(reopened(&file).ahead(), [60, 61], "the shorter one replaces the longer one");
    }

    #[test]
    fn a_damaged_file_is_learnt_again() {
        let file = empty();
        let mut set = reopened(&file);
        for _ in 0..2 {
            set.lived(vec![1, 2], false).unwrap();
        }
        let bytes = encode(&[1, 2]);
        assert_eq!(decode(&bytes, 100), Some(vec![1, 2]));
        assert_eq!(decode(&bytes, 2), None, "a frame that there is not");
        for at in 0..bytes.len() {
            let mut altered = bytes.clone();
            altered[at] ^= 4;
            assert_eq!(decode(&altered, 100), None);
            assert_eq!(decode(&bytes[..at], 100), None);
        }
        file.set_len(1 << 20).unwrap();
        assert!(reopened(&file).ahead().is_empty());
    }
}
