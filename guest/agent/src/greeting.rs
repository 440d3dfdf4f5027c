//! The first frame of a connection, gathered without waiting.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use stasis_guest_wire::{
    frame::{self, FrameError},
    wake::FromNode,
};

use crate::socket::receive;

/// A connection that has not said what it wants.
#[derive(Debug)]
pub struct Greeting {
    stream: OwnedFd,
    bytes: Vec<u8>,
}

/// What has come of it.
#[derive(Debug)]
pub enum Heard {
    /// More must come.
    Part(Greeting),
    /// All of it.
    Whole {
        /// The connection.
        stream: OwnedFd,
        /// What it wants.
        message: FromNode,
        /// What was read beyond that: the function's.
        early: Vec<u8>,
    },
    /// Something else.
    Garbage {
        /// The connection.
        stream: OwnedFd,
        /// What is wrong with it.
        error: FrameError,
    },
}

impl Greeting {
    /// A connection that was just accepted.
    #[must_use]
    pub fn new(stream: OwnedFd) -> Self {
        Self { stream, bytes: Vec::new() }
    }

    /// What to poll for input.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Reads what is there.
    ///
    /// # Errors
    /// The connection failed or ended before its first frame did.
    pub fn step(mut self, buffer: &mut [u8]) -> io::Result<Heard> {
        match receive(&self.stream, buffer)? {
            None => return Ok(Heard::Part(self)),
            Some(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Some(count) => self.bytes.extend_from_slice(&buffer[..count]),
        }
        Ok(match first(&self.bytes) {
            Ok(None) => Heard::Part(self),
            Ok(Some((message, end))) => Heard::Whole { stream: self.stream, message, early: self.bytes.split_off(end) },
            Err(error) => Heard::Garbage { stream: self.stream, error },
        })
    }
}

/// The first message and where it ends, if all of it is there.
fn first(bytes: &[u8]) -> Result<Option<(FromNode, usize)>, FrameError> {
    let Some((header, rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
    let length = frame::body_length(*header)?;
    let Some(body) = rest.get(..length) else { return Ok(None) };
    Ok(Some((frame::decode(body)?, 4 + length)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io::Write, os::unix::net::UnixStream};

    fn heard(chunks: &[&[u8]]) -> Heard {
        let (mut far, near) = UnixStream::pair().unwrap();
        let mut greeting = Greeting::new(near.into());
        for chunk in chunks {
            far.write_all(chunk).unwrap();
            match greeting.step(&mut [0; 64]).unwrap() {
                Heard::Part(same) => greeting = same,
                other => return other,
            }
        }
        Heard::Part(greeting)
    }

    #[test]
    fn a_frame_may_come_in_pieces_and_with_more_behind_it() {
        let frame = frame::encode(&FromNode::Forward).unwrap();
        let (head, tail) = frame.split_at(3);
        assert!(matches!(heard(&[head]), Heard::Part(_)));
        assert!(matches!(heard(&[head, &tail[..4]]), Heard::Part(_)));
        match heard(&[head, &[tail, b"GET /"].concat()]) {
            Heard::Whole { message: FromNode::Forward, early, .. } => assert_eq!(early, b"GET /"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn garbage_is_known_as_such() {
        for garbage in [b"GET / HTTP/1.1\r\n\r\n".as_slice(), b"\xff\xff\xff\xff", b"\x02\0\0\0{}", b"\0\0\0\0"] {
            assert!(matches!(heard(&[garbage]), Heard::Garbage { .. }), "{garbage:?}");
        }
    }

    #[test]
    fn an_end_before_the_frame_s_is_an_error() {
        let (far, near) = UnixStream::pair().unwrap();
        drop(far);
        assert!(Greeting::new(near.into()).step(&mut [0; 8]).is_err());
    }
}
