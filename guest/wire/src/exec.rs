//! A command beside the function.
//!
//! ```text
//! node  → agent  Exec(Exec)
//! agent → node   Executing         then parts, the last of which says how the command ended
//!              | Refused { .. }
//! ```
//! A part is a frame whose body is no JSON: one byte that says what it is, then bytes. A node that closes the connection before the end has
//! the command and its process group killed.

use alloc::{collections::BTreeMap, string::String, vec::Vec};

use serde::{Deserialize, Serialize};

use crate::frame::{FrameError, MAX_FRAME};

/// What to run, as the function's user.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    /// The program, looked for in `PATH`, and its arguments.
    pub command: Vec<String>,
    /// Variables beside those of the function.
    pub env: BTreeMap<String, String>,
    /// Where; the function's directory if not given.
    pub directory: Option<String>,
    /// What it reads from its standard input, which then ends.
    pub stdin: String,
}

/// What comes of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// It wrote this to its standard output.
    Stdout(Vec<u8>),
    /// It wrote this to its standard error.
    Stderr(Vec<u8>),
    /// It ended with this status.
    Exited(i32),
    /// It was ended by this signal.
    Killed(i32),
}

/// A body that is no part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a frame of {0} bytes is no part of a command's output")]
pub struct NoPart(pub usize);

impl Part {
    /// Its frame.
    ///
    /// # Errors
    /// [`FrameError::TooLong`] if the bytes are over the limit.
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let (kind, bytes) = match self {
            Self::Stdout(bytes) => (b'o', bytes.clone()),
            Self::Stderr(bytes) => (b'e', bytes.clone()),
            Self::Exited(status) => (b'x', status.to_le_bytes().to_vec()),
            Self::Killed(signal) => (b'k', signal.to_le_bytes().to_vec()),
        };
        let length = bytes.len() + 1;
        let header = u32::try_from(length).ok().filter(|_| length <= MAX_FRAME);
        let header = header.ok_or(FrameError::TooLong(length))?;
        Ok([header.to_le_bytes().as_slice(), &[kind], &bytes].concat())
    }

    /// From a frame's body.
    ///
    /// # Errors
    /// It is none.
    pub fn decode(body: &[u8]) -> Result<Self, NoPart> {
        let no = NoPart(body.len());
        let (kind, bytes) = body.split_first().ok_or(no)?;
        let number = || bytes.try_into().map(i32::from_le_bytes).map_err(|_| no);
        match kind {
            b'o' => Ok(Self::Stdout(bytes.to_vec())),
            b'e' => Ok(Self::Stderr(bytes.to_vec())),
            b'x' => number().map(Self::Exited),
            b'k' => number().map(Self::Killed),
            _ => Err(no),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_comes_back_and_nothing_else_is_one() {
        for part in [Part::Stdout(b"a\xff\n".to_vec()), Part::Stderr(Vec::new()), Part::Exited(-1), Part::Killed(9)] {
            let frame = part.encode().unwrap();
            let (header, body) = frame.split_first_chunk::<4>().unwrap();
            assert_eq!(crate::frame::body_length(*header).unwrap(), body.len());
            assert_eq!(Part::decode(body), Ok(part));
        }
        for bad in [b"".as_slice(), b"x123", b"x12345", b"k", b"?abc"] {
            assert_eq!(Part::decode(bad), Err(NoPart(bad.len())));
        }
        assert!(matches!(Part::Stdout(vec![0; MAX_FRAME]).encode(), Err(FrameError::TooLong(_))));
    }
}
