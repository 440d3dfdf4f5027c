//! What the function answers.
//!
//! | request | answer |
//! |---|---|
//! | `GET /` | `ok` |
//! | `GET /identity` | JSON: generation, host name, machine id, boot nonce, and how many requests this memory has answered |
//! | `PUT /memory`, `GET /memory` | keeps the body in memory, and tells it |
//! | `GET /wait/N` | an answer after N microseconds (`waited`); other connections are served meanwhile |

use alloc::{format, string::String, vec::Vec};
use core::{str, time::Duration};

use crate::agent::Identity;

/// Headers of a request, at most.
const HEADERS: usize = 64;
/// Longest body, in bytes: a connection's window is not much more.
const LONGEST: usize = 1 << 20;

/// The function's memory.
#[derive(Debug, Default)]
pub struct Function {
    answered: u64,
    kept: Vec<u8>,
}

/// One request, whole.
#[derive(Debug)]
pub struct Request<'a> {
    method: &'a str,
    path: &'a str,
    body: &'a [u8],
    /// The client wants no more of this connection.
    pub closes: bool,
}

/// One answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    /// At once.
    Now {
        /// HTTP status and its phrase.
        status: &'static str,
        /// The body.
        body: Vec<u8>,
    },
    /// After so long, then it is `ok`.
    Later(Duration),
}

impl Reply {
    pub(crate) fn ok(body: impl Into<Vec<u8>>) -> Self {
        Self::Now { status: "200 OK", body: body.into() }
    }

    fn refused(status: &'static str, reason: &str) -> Self {
        Self::Now { status, body: format!("{reason}\n").into_bytes() }
    }

    /// As it goes over the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let Self::Now { status, body } = self else { return Vec::new() };
        let mut bytes = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len()).into_bytes();
        bytes.extend_from_slice(body);
        bytes
    }
}

impl<'a> Request<'a> {
    /// The first request of the input, and its length, if all of it is there.
    ///
    /// # Errors
    /// It is none that this function takes: the answer, after which the connection ends.
    pub fn parse(input: &'a [u8]) -> Result<Option<(Self, usize)>, Reply> {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS];
        let mut head = httparse::Request::new(&mut headers);
        let bad = |_| Reply::refused("400 Bad Request", "this is no HTTP/1.1 request");
        let httparse::Status::Complete(at) = head.parse(input).map_err(bad)? else { return Ok(None) };
        let header = |name: &str| {
            let found = head.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
            found.and_then(|header| str::from_utf8(header.value).ok())
        };
        if header("transfer-encoding").is_some() {
            return Err(Reply::refused("411 Length Required", "say the body's length"));
        }
        let length = match header("content-length").map(str::parse) {
            None => 0,
            Some(Ok(length)) if length <= LONGEST => length,
            Some(_) => return Err(Reply::refused("413 Content Too Large", "a body is at most 1 MiB")),
        };
        let closes = header("connection").is_some_and(|value| value.eq_ignore_ascii_case("close"));
        let Some(body) = input.get(at..at + length) else { return Ok(None) };
        let (method, path) = (head.method.unwrap_or_default(), head.path.unwrap_or_default());
        Ok(Some((Self { method, path, body, closes }, at + length)))
    }
}

impl Function {
    /// Does what is asked.
    pub fn call(&mut self, request: &Request<'_>, identity: &Identity) -> Reply {
        self.answered += 1;
        let path = request.path.split('?').next().unwrap_or_default();
        match (request.method, path) {
            ("GET", "/") => Reply::ok("ok\n"),
            ("GET", "/identity") => Reply::ok(self.identity(identity)),
            ("GET", "/memory") => Reply::ok(self.kept.clone()),
            ("PUT", "/memory") => {
                self.kept = request.body.to_vec();
                Reply::ok("kept\n")
            }
            ("GET", path) => match path.strip_prefix("/wait/").map(str::parse) {
                Some(Ok(micros)) => Reply::Later(Duration::from_micros(micros)),
                Some(Err(_)) => Reply::refused("400 Bad Request", "wait for a number of microseconds"),
                None => Reply::refused("404 Not Found", "there is /, /identity, /memory and /wait/MICROSECONDS"),
            },
            _ => Reply::refused("405 Method Not Allowed", "use GET, or PUT /memory"),
        }
    }

    fn identity(&self, identity: &Identity) -> String {
        let Identity { generation, hostname, machine_id, boot_nonce } = identity;
        format!(
            "{{\"generation\":{generation},\"hostname\":\"{hostname}\",\"machine_id\":\"{machine_id}\",\"boot_nonce\":\"{boot_nonce}\",\"answered\":{}}}\n",
            self.answered
        )
    }
}
