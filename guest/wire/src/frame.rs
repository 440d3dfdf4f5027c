//! Frames: four bytes of length (little endian), then that many bytes of JSON.

use alloc::{vec, vec::Vec};
#[cfg(feature = "std")]
use std::io::{self, Read, Write};

use serde::{Serialize, de::DeserializeOwned};

/// Longest body of a frame, in bytes. Both sides refuse more before they allocate.
pub const MAX_FRAME: usize = 1 << 20;

/// A frame that could not be sent or understood.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The connection ended or failed.
    #[cfg(feature = "std")]
    #[error("the connection failed")]
    Io(#[from] io::Error),
    /// The other side announced, or this side made, a body over [`MAX_FRAME`].
    #[error("a frame of {0} bytes is over the limit of {MAX_FRAME}")]
    TooLong(usize),
    /// The body is not the JSON of the expected message.
    #[error("the frame is not the expected message")]
    Json(#[from] serde_json::Error),
}

/// The bytes of one frame.
///
/// # Errors
/// [`FrameError::TooLong`] if the message is over the limit; [`FrameError::Json`] if it cannot be
/// expressed in JSON.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut frame = vec![0; 4];
    frame.append(&mut serde_json::to_vec(message)?);
    let length = frame.len() - 4;
    let header = u32::try_from(length).ok().filter(|_| length <= MAX_FRAME);
    let header = header.ok_or(FrameError::TooLong(length))?;
    frame[..4].copy_from_slice(&header.to_le_bytes());
    Ok(frame)
}

/// Length of the body that a header announces.
///
/// # Errors
/// [`FrameError::TooLong`] if it is over [`MAX_FRAME`].
pub fn body_length(header: [u8; 4]) -> Result<usize, FrameError> {
    let length = u32::from_le_bytes(header) as usize;
    if length > MAX_FRAME {
        return Err(FrameError::TooLong(length));
    }
    Ok(length)
}

/// The message in a frame's body.
///
/// # Errors
/// [`FrameError::Json`] if the body is something else.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, FrameError> {
    Ok(serde_json::from_slice(body)?)
}

/// Sends one message (blocking).
///
/// # Errors
/// As [`encode`], and [`FrameError::Io`].
#[cfg(feature = "std")]
pub fn send<T: Serialize>(to: &mut impl Write, message: &T) -> Result<(), FrameError> {
    to.write_all(&encode(message)?)?;
    Ok(to.flush()?)
}

/// Receives one message (blocking), reading not one byte beyond it.
///
/// # Errors
/// As [`body_length`] and [`decode`], and [`FrameError::Io`].
#[cfg(feature = "std")]
pub fn receive<T: DeserializeOwned>(from: &mut impl Read) -> Result<T, FrameError> {
    let mut header = [0; 4];
    from.read_exact(&mut header)?;
    let mut body = vec![0; body_length(header)?];
    from.read_exact(&mut body)?;
    decode(&body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_sent_is_received(messages in proptest::collection::vec(".{0,200}", 1..5)) {
            let mut wire = Vec::new();
            for message in &messages {
                send(&mut wire, message).unwrap();
            }
            let mut rest = wire.as_slice();
            for message in &messages {
                prop_assert_eq!(&receive::<String>(&mut rest).unwrap(), message);
            }
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = receive::<String>(&mut bytes.as_slice());
        }
    }

    #[test]
    fn a_long_frame_is_refused_before_it_is_read() {
        let header = u32::try_from(MAX_FRAME + 1).unwrap().to_le_bytes();
        assert!(matches!(receive::<String>(&mut header.as_slice()), Err(FrameError::TooLong(_))));
    }
}
