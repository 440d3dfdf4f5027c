//! The Connect protocol, as much of it as the SDKs speak: JSON alone, uncompressed.
//!
//! ```text
//!  unary    POST, application/json:          a message ─▶ 200 and a message, or a status and {"code","message"}
//!  streams  POST, application/connect+json:  frames ─▶ 200 and frames, the last one of them {} or {"error":{"code","message"}}
//!  frame    1 byte of flags, 4 bytes of length (big endian), JSON
//! ```

mod error;
mod frame;
mod request;
pub(crate) mod value;

pub(crate) use error::{Code, RpcError};
pub(crate) use frame::{Frames, end, message};
pub(crate) use request::{first, parse, stream, unary};

#[cfg(test)]
mod tests;
