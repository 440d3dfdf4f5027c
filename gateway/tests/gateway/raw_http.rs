//! HTTP by hand.

use tokio::{io::AsyncReadExt as _, net::TcpStream, time::timeout};

use crate::support::PATIENCE;

/// An answer as it came.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers(name).into_iter().next()
    }

    pub(crate) fn headers(&self, name: &str) -> Vec<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value).collect()
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Status, code and message of an error, whose id must be the header's.
    pub(crate) fn error(&self) -> (u16, String, String) {
        let json = self.json();
        assert_eq!(json["request_id"].as_str(), self.header("x-request-id"), "{json}");
        let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
        (self.status, text(&json["error"]["code"]), text(&json["error"]["message"]))
    }
}

pub(crate) async fn read_answer(stream: &mut TcpStream) -> Answer {
    let mut bytes = Vec::new();
    timeout(PATIENCE, stream.read_to_end(&mut bytes)).await.expect("no end of the answer").unwrap();
    parse_answer(&bytes)
}

pub(crate) fn parse_answer(bytes: &[u8]) -> Answer {
    let split = bytes.windows(4).position(|four| four == b"\r\n\r\n");
    let split = split.unwrap_or_else(|| panic!("no head in {:?}", String::from_utf8_lossy(bytes)));
    let head = String::from_utf8_lossy(&bytes[..split]).into_owned();
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_default();
    Answer { status, head, body: bytes[split + 4..].to_vec() }
}

/// Reads until `end` has come.
pub(crate) async fn read_to(stream: &mut (impl tokio::io::AsyncRead + Unpin), end: &str) -> String {
    let mut seen = Vec::new();
    let read = async {
        while !String::from_utf8_lossy(&seen).contains(end) {
            let mut some = [0; 4096];
            match stream.read(&mut some).await {
                Ok(count) if count > 0 => seen.extend_from_slice(&some[..count]),
                _ => break,
            }
        }
    };
    timeout(PATIENCE, read).await.unwrap_or_else(|_| panic!("never saw {end:?}"));
    String::from_utf8_lossy(&seen).into_owned()
}
