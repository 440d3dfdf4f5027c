//! The wake page: one page of the guest's own memory, through which a wake is ordered and proved without a packet.
//!
//! ```text
//!         the agent parks            the node orders            the agent has repaired
//!  shut ─────────────────▶ waiting ──────────────────▶ ordered ───────────────────────▶ answered
//!                            └─ it is told otherwise, or waits no longer ─▶ shut
//! ```
//!
//! The parked agent looks at it from user mode until there is an order: it needs no interrupt, no system call and no page that is not there. The
//! snapshot has the page as it waits, so the VMM writes the order into it before the restored guest's first instruction. The agent takes the order
//! out, leaves its answer there and rings: it raises the first serial port's OUT1 line, which is wired to nothing in any PC and whose register every
//! access of leaves the guest for the VMM. What is in the page goes with the guest's memory: no rewind or restore shows it to another life.
//!
//! Before the snapshot, while it waits, it raises and lowers the line again and again: whenever it has looked for some milliseconds in which its kernel
//! gave the CPU to nobody else, and at last in any case. A snapshot that is taken then has little in it that a restored guest would do first.
//!
//! The state is a word of the guest's memory and may be anything at any time: the VMM copies the page once and believes nothing else of it.

use alloc::{borrow::ToOwned, string::String};

use serde::{Deserialize, Serialize};

/// Bytes of the page.
pub const SIZE: usize = 4096;
/// Where the agent's token is: 8 bytes, little endian, as all numbers here.
pub const TOKEN: usize = 0;
/// Where the state is: 4 bytes.
pub const STATE: usize = 8;
/// Where the text's length is: 4 bytes.
pub const LENGTH: usize = 12;
/// Where the text begins: JSON, an order ([`crate::wake::Wake`]) or an answer ([`crate::wake::FromAgent`]).
pub const TEXT: usize = 16;
/// Longest text, in bytes.
pub const LONGEST: usize = SIZE - TEXT;

/// Nobody looks at it.
pub const SHUT: u32 = 0;
/// The agent looks at it, and at nothing else.
pub const WAITING: u32 = 1;
/// There is an order.
pub const ORDERED: u32 = 2;
/// There is an answer.
pub const ANSWERED: u32 = 3;

/// Register of the first serial port behind its first one, and the bit in it: modem control, OUT1. Raised: there is an answer. Lowered: the guest
/// rests.
pub const BELL: (u16, u8) = (4, 1 << 2);

/// Where a guest's wake page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WakePage {
    /// Its first byte, in the guest's physical memory.
    pub address: u64,
    /// What the agent has written into it, to be known by.
    pub token: u64,
}

/// What the page's first bytes say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// The agent's token.
    pub token: u64,
    /// One of the states, from an honest guest.
    pub state: u32,
    length: u32,
}

impl Head {
    /// Of a copy of the page.
    #[must_use]
    pub fn of(page: &[u8; SIZE]) -> Self {
        let mut token = [0; 8];
        token.copy_from_slice(&page[TOKEN..TOKEN + 8]);
        let word = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&page[at..at + 4]);
            u32::from_le_bytes(word)
        };
        Self { token: u64::from_le_bytes(token), state: word(STATE), length: word(LENGTH) }
    }
}

/// The text in a copy of the page; none where that is no text.
#[must_use]
pub fn text(page: &[u8; SIZE]) -> Option<String> {
    let length = usize::try_from(Head::of(page).length).ok()?;
    let text = page[TEXT..].get(..length)?;
    core::str::from_utf8(text).ok().map(ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use alloc::boxed::Box;

    use proptest::prelude::*;

    use super::*;

    fn page(length: u32, bytes: &[u8]) -> Box<[u8; SIZE]> {
        let mut page = Box::new([0; SIZE]);
        page[LENGTH..LENGTH + 4].copy_from_slice(&length.to_le_bytes());
        page[TEXT..TEXT + bytes.len()].copy_from_slice(bytes);
        page
    }

    #[test]
    fn a_text_has_the_length_that_it_is_said_to_have_or_is_none() {
        assert_eq!(text(&page(3, b"abcd")).as_deref(), Some("abc"));
        assert_eq!(text(&page(0, b"abcd")).as_deref(), Some(""));
        assert_eq!(text(&page(2, &[0xff, 0xff])), None);
        let whole = u32::try_from(LONGEST).unwrap();
        assert_eq!(text(&page(whole, &[b'x'; LONGEST])).map(|text| text.len()), Some(LONGEST));
        assert_eq!([whole + 1, u32::MAX].map(|length| text(&page(length, b""))), [None, None]);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), SIZE)) {
            let page: [u8; SIZE] = bytes.try_into().unwrap();
            let _ = (Head::of(&page), text(&page));
        }
    }
}
