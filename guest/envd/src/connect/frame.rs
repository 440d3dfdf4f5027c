//! Frames of streams.

use axum::{body::Body, response::Response};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{HeaderValue, header::CONTENT_TYPE};
use http_body_util::BodyExt;
use serde::Serialize;

use crate::connect::{Code, RpcError, error::Told};

/// Flags and length.
const HEAD: usize = 5;
const COMPRESSED: u8 = 1;
const END: u8 = 2;
/// Most bytes of a message that is received.
pub(crate) const LARGEST: usize = 16 * 1024 * 1024;

/// A frame with a message.
pub(crate) fn message(value: &impl Serialize) -> Bytes {
    frame(0, value)
}

/// The last frame.
pub(crate) fn end(error: Option<&RpcError>) -> Bytes {
    #[derive(Serialize)]
    struct End<'a> {
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<Told<'a>>,
    }
    frame(END, &End { error: error.map(RpcError::told) })
}

fn frame(flags: u8, value: &impl Serialize) -> Bytes {
    let mut bytes = BytesMut::with_capacity(128);
    bytes.put_u8(flags);
    bytes.put_u32(0);
    let mut writer = bytes.writer();
    // What we serialise are maps with text keys, into memory: that cannot fail.
    let _ = serde_json::to_writer(&mut writer, value);
    let mut bytes = writer.into_inner();
    let length = u32::try_from(bytes.len() - HEAD).unwrap_or(u32::MAX);
    if let Some(place) = bytes.get_mut(1..HEAD) {
        place.copy_from_slice(&length.to_be_bytes());
    }
    bytes.freeze()
}

/// An answer of frames.
pub(crate) fn response(body: Body) -> Response {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/connect+json"));
    response
}

/// The frames of a request, one after the other.
#[derive(Debug)]
pub(crate) struct Frames {
    body: Body,
    buffer: BytesMut,
}

impl Frames {
    pub(crate) fn new(body: Body) -> Self {
        Self { body, buffer: BytesMut::new() }
    }

    /// The next message; none after the last.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, RpcError> {
        loop {
            if let Some(message) = take(&mut self.buffer)? {
                return Ok(Some(message));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                Some(Err(error)) => return Err(RpcError::invalid(format!("the request broke off: {error}"))),
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(RpcError::invalid("protocol error: incomplete envelope: unexpected EOF")),
            }
        }
    }
}

/// Takes a whole message off the front.
fn take(buffer: &mut BytesMut) -> Result<Option<Bytes>, RpcError> {
    let Some((&[flags, a, b, c, d], _)) = buffer.split_first_chunk::<HEAD>() else { return Ok(None) };
    let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
    if length > LARGEST {
        return Err(RpcError::new(
            Code::ResourceExhausted,
            format!("message size {length} is larger than configured max {LARGEST}"),
        ));
    }
    if flags & COMPRESSED != 0 {
        return Err(RpcError::new(
            Code::Internal,
            "protocol error: sent compressed message without compression support",
        ));
    }
    if flags != 0 {
        return Err(RpcError::invalid(format!("protocol error: invalid envelope flags {flags}")));
    }
    if buffer.len() < HEAD + length {
        return Ok(None);
    }
    buffer.advance(HEAD);
    Ok(Some(buffer.split_to(length).freeze()))
}
