//! A small blocking HTTP/1.1 client that shows the bytes: one connection per request, read and written piece by piece.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::TcpStream,
    time::Duration,
};

use serde_json::Value;

/// Longer than anything here takes, on a busy machine whose guests' kernels are interpreted.
const PATIENCE: Duration = Duration::from_secs(240);

/// Where a server listens.
#[derive(Debug, Clone)]
pub(crate) struct Api {
    authority: String,
    /// A tenant's, where there are tenants.
    key: Option<String>,
}

/// An answer, whole.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) head: Head,
    pub(crate) body: Vec<u8>,
}

/// Its beginning.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
}

/// A connection in the midst of a request.
#[derive(Debug)]
pub(crate) struct Exchange {
    stream: BufReader<TcpStream>,
}

impl Api {
    pub(crate) fn at(url: &str) -> Self {
        Self { authority: url.strip_prefix("http://").expect("an http URL").to_owned(), key: None }
    }

    /// The same for a tenant.
    pub(crate) fn with_key(&self, key: &str) -> Self {
        Self { authority: self.authority.clone(), key: Some(key.to_owned()) }
    }

    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }

    pub(crate) fn get(&self, target: &str) -> Answer {
        self.call("GET", target, &[], b"")
    }

    pub(crate) fn post(&self, target: &str, body: &[u8]) -> Answer {
        self.call("POST", target, &[], body)
    }

    /// One request, which must be answered whole.
    pub(crate) fn call(&self, method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        self.try_call(method, target, headers, body).unwrap_or_else(|error| panic!("{method} {target}: {error}"))
    }

    pub(crate) fn try_call(
        &self,
        method: &str,
        target: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<Answer> {
        let length = body.len().to_string();
        let mut headers = headers.to_vec();
        if !body.is_empty() {
            headers.push(("Content-Length", &length));
        }
        let mut exchange = self.begin(method, target, &headers)?;
        // A server that refuses the body may close its ear; what it says is read all the same.
        let _ = exchange.send(body);
        let head = exchange.head()?;
        let body = if method == "HEAD" { Vec::new() } else { exchange.rest(&head)? };
        Ok(Answer { head, body })
    }

    /// Sends a request's head; its body, if any, is the caller's to send.
    pub(crate) fn begin(&self, method: &str, target: &str, headers: &[(&str, &str)]) -> io::Result<Exchange> {
        let mut head = format!("{method} {target} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", self.authority);
        if let Some(key) = &self.key {
            head.push_str(&format!("X-API-Key: {key}\r\n"));
        }
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        let stream = TcpStream::connect(&self.authority)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut exchange = Exchange { stream: BufReader::new(stream) };
        exchange.send(format!("{head}\r\n").as_bytes())?;
        Ok(exchange)
    }
}

impl Exchange {
    pub(crate) fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// One chunk of a chunked body; an empty one ends it.
    pub(crate) fn send_chunk(&mut self, data: &[u8]) -> io::Result<()> {
        self.send(&[format!("{:x}\r\n", data.len()).as_bytes(), data, b"\r\n"].concat())
    }

    pub(crate) fn head(&mut self) -> io::Result<Head> {
        let first = self.line()?;
        let status = first.split(' ').nth(1).and_then(|code| code.parse().ok());
        let status = status.ok_or_else(|| io::Error::other(format!("{first:?} is no status line")))?;
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            match line.split_once(':') {
                Some((name, value)) => headers.push((name.to_ascii_lowercase(), value.trim().to_owned())),
                None if line.is_empty() => return Ok(Head { status, headers }),
                None => return Err(io::Error::other(format!("{line:?} is no header"))),
            }
        }
    }

    /// The next chunk of a chunked answer; None at its proper end.
    pub(crate) fn chunk(&mut self) -> io::Result<Option<Vec<u8>>> {
        let size = self.line()?;
        let size = usize::from_str_radix(&size, 16).map_err(|_| io::Error::other(format!("{size:?} is no size")))?;
        let mut data = vec![0; size];
        self.stream.read_exact(&mut data)?;
        self.line()?;
        Ok((size > 0).then_some(data))
    }

    /// What is left of the answer. An error if it ends before it should.
    pub(crate) fn rest(&mut self, head: &Head) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        if head.header("transfer-encoding").is_some() {
            while let Some(chunk) = self.chunk()? {
                body.extend(chunk);
            }
        } else if let Some(length) = head.header("content-length") {
            body.resize(length.parse().map_err(io::Error::other)?, 0);
            self.stream.read_exact(&mut body)?;
        } else if !matches!(head.status, 204 | 304) {
            self.stream.read_to_end(&mut body)?;
        }
        Ok(body)
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        match line.strip_suffix("\r\n") {
            Some(line) => Ok(line.to_owned()),
            None => Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("the connection ended after {line:?}"))),
        }
    }
}

impl Head {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

impl Answer {
    pub(crate) fn status(&self) -> u16 {
        self.head.status
    }

    /// A header that must be there.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.head.header(name).unwrap_or_else(|| panic!("no header {name} in {:?}", self.head))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// It is a success; so goes on as its JSON.
    pub(crate) fn success(&self) -> Value {
        assert_eq!(self.status(), 200, "{}", self.text());
        self.json()
    }
}
