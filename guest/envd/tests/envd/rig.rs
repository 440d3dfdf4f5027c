//! A daemon and a client of it.

use std::{fs, os::unix::fs::chown, path::PathBuf, time::Duration};

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response, StatusCode, body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use stasis_envd::{Config, Door, Envd, serve};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};

/// No wait is longer.
const LIMIT: Duration = Duration::from_secs(60);

/// The future's value, or a failure after [`LIMIT`].
pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(LIMIT, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: nothing within {LIMIT:?}"),
    }
}

/// A daemon whose `user` is uid 1000 if we are root, else ourselves.
pub(crate) struct Rig {
    pub(crate) envd: Envd,
    pub(crate) address: String,
    pub(crate) uid: u32,
    home: TempDir,
    _database: TempDir,
}

impl Rig {
    pub(crate) async fn new() -> Self {
        Self::with(|_| {}).await
    }

    pub(crate) async fn with(change: impl FnOnce(&mut Config)) -> Self {
        let home = TempDir::new().unwrap();
        let euid = rustix::process::geteuid().as_raw();
        let (uid, gid) = if euid == 0 { (1000, 1000) } else { (euid, rustix::process::getegid().as_raw()) };
        chown(home.path(), Some(uid), Some(gid)).unwrap();
        let database = TempDir::new().unwrap();
        let users = database.path();
        let passwd =
            format!("root:x:0:0:root:/root:/bin/bash\nuser:x:{uid}:{gid}::{}:/bin/bash\n", home.path().display());
        fs::write(users.join("passwd"), passwd).unwrap();
        fs::write(users.join("group"), format!("root:x:0:\nuser:x:{gid}:\nextra:x:4242:user\n")).unwrap();
        let mut config = Config { passwd: users.join("passwd"), group: users.join("group"), ..Config::default() };
        change(&mut config);
        let envd = Envd::new(config);
        let address = open(&envd, Door::Public).await;
        Self { envd, address, uid, home, _database: database }
    }

    /// A path in the user's home.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> Response<Incoming> {
        send(&self.address, request).await
    }

    /// The whole answer.
    pub(crate) async fn answer(&self, request: Request<Full<Bytes>>) -> (StatusCode, Bytes) {
        let response = self.send(request).await;
        let status = response.status();
        (status, within("the answer's body", response.into_body().collect()).await.unwrap().to_bytes())
    }

    /// A unary call.
    pub(crate) async fn call(&self, method: &str, message: &Value) -> (StatusCode, Value) {
        self.call_as(method, message, &[]).await
    }

    pub(crate) async fn call_as(&self, method: &str, message: &Value, headers: &[(&str, &str)]) -> (StatusCode, Value) {
        let request = request(method, "application/json", headers, message.to_string());
        let (status, body) = self.answer(request).await;
        (status, serde_json::from_slice(&body).unwrap_or_else(|_| panic!("{method}: {status} {body:?}")))
    }

    /// A call that answers a stream.
    pub(crate) async fn stream(&self, method: &str, message: &Value) -> Stream {
        self.stream_as(method, message, &[]).await
    }

    pub(crate) async fn stream_as(&self, method: &str, message: &Value, headers: &[(&str, &str)]) -> Stream {
        let request = request(method, "application/connect+json", headers, frame(message));
        let response = self.send(request).await;
        assert_eq!(response.status(), StatusCode::OK, "{method}");
        assert_eq!(response.headers()["content-type"], "application/connect+json");
        Stream { body: response.into_body(), buffer: BytesMut::new() }
    }

    /// Starts a shell line as `commands.run` does.
    pub(crate) async fn run(&self, line: &str) -> Stream {
        self.stream("process.Process/Start", &shell(line)).await
    }
}

/// Serves one more listener.
pub(crate) async fn open(envd: &Envd, door: Door) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let envd = envd.clone();
    tokio::spawn(async move { serve(listener, envd, door).await });
    address
}

/// Over a connection of its own, which ends with the answer's body.
pub(crate) async fn send(address: &str, request: Request<Full<Bytes>>) -> Response<Incoming> {
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    within("the answer", sender.send_request(request)).await.unwrap()
}

pub(crate) fn request(
    method: &str,
    content_type: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Request<Full<Bytes>> {
    let mut request =
        Request::post(format!("/{method}")).header("host", "sandbox").header("content-type", content_type);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Full::new(body.into())).unwrap()
}

pub(crate) fn shell(line: &str) -> Value {
    serde_json::json!({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", line]}, "stdin": false})
}

pub(crate) fn frame(message: &Value) -> Vec<u8> {
    let json = message.to_string();
    [&[0][..], &u32::try_from(json.len()).unwrap().to_be_bytes(), json.as_bytes()].concat()
}

/// The frames of an answer.
pub(crate) struct Stream {
    body: Incoming,
    buffer: BytesMut,
}

/// All that a process said.
#[derive(Debug, Default)]
pub(crate) struct Said {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) pty: Vec<u8>,
    pub(crate) end: Option<Value>,
    /// Of the last frame.
    pub(crate) error: Option<Value>,
}

impl Said {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

impl Stream {
    /// Flags and message of the next frame; none at the end of the body.
    pub(crate) async fn next(&mut self) -> Option<(u8, Value)> {
        loop {
            if let Some(&[flags, a, b, c, d]) = self.buffer.first_chunk::<5>() {
                let length = u32::from_be_bytes([a, b, c, d]) as usize;
                if self.buffer.len() >= 5 + length {
                    self.buffer.advance(5);
                    return Some((flags, serde_json::from_slice(&self.buffer.split_to(length)).unwrap()));
                }
            }
            match within("a frame", self.body.frame()).await {
                Some(frame) => self.buffer.extend_from_slice(&frame.unwrap().into_data().unwrap()),
                None => {
                    assert!(self.buffer.is_empty(), "half a frame at the end: {:?}", self.buffer);
                    return None;
                }
            }
        }
    }

    /// The next event of a process.
    pub(crate) async fn event(&mut self) -> Value {
        let (flags, mut message) = self.next().await.expect("an event");
        assert_eq!(flags, 0, "an event, not the end: {message}");
        message["event"].take()
    }

    /// The id of the process, which comes first.
    pub(crate) async fn pid(&mut self) -> u64 {
        let event = self.event().await;
        event["start"]["pid"].as_u64().unwrap_or_else(|| panic!("start comes first, not {event}"))
    }

    /// All until the end, after the start was taken.
    pub(crate) async fn rest(&mut self) -> Said {
        let mut said = Said::default();
        while let Some((flags, message)) = self.next().await {
            if flags == 2 {
                said.error = message.get("error").cloned();
                assert_eq!(self.next().await, None, "nothing comes after the end");
                return said;
            }
            said.take(&message["event"]);
        }
        panic!("the stream broke off after {said:?}");
    }

    /// Reads until some output holds `text`.
    pub(crate) async fn until(&mut self, text: &str) -> Said {
        let mut said = Said::default();
        let holds = |bytes: &[u8]| bytes.windows(text.len()).any(|window| window == text.as_bytes());
        while !holds(&said.stdout) && !holds(&said.stderr) && !holds(&said.pty) {
            let event = tokio::select! {
                event = self.event() => event,
                () = tokio::time::sleep(LIMIT / 2) => panic!("no {text:?} in {said:?}"),
            };
            assert!(event.get("end").is_none(), "it ended before {text:?}: {said:?} {event}");
            said.take(&event);
        }
        said
    }
}

impl Said {
    fn take(&mut self, event: &Value) {
        use base64::{Engine, engine::general_purpose::STANDARD};
        if let Some(end) = event.get("end") {
            self.end = Some(end.clone());
        }
        for (name, bytes) in [("stdout", &mut self.stdout), ("stderr", &mut self.stderr), ("pty", &mut self.pty)] {
            if let Some(text) = event["data"][name].as_str() {
                bytes.extend(STANDARD.decode(text).unwrap());
            }
        }
    }
}
