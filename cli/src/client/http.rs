//! One request to the gateway.

use std::{error::Error as _, io, time::Duration};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Request, Response, header};
use http_body_util::{BodyExt as _, Limited};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, time::timeout};

use super::{body::Outgoing, url::ApiUrl};

const CONNECT: Duration = Duration::from_secs(5);
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// Most of an answer that is read as JSON.
const MAX_JSON: usize = 64 << 20;

/// A connection to the gateway, for one request after another.
#[derive(Debug)]
pub(crate) struct Connection {
    sender: http1::SendRequest<Outgoing>,
    api: ApiUrl,
    local: bool,
}

impl Connection {
    pub(crate) async fn open(api: &ApiUrl) -> anyhow::Result<Self> {
        let stream = connect(api).await?;
        stream.set_nodelay(true)?;
        let local = stream.local_addr()?.ip() == stream.peer_addr()?.ip();
        // Its failures show in the answer.
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(Self { sender, api: api.clone(), local })
    }

    /// Both ends are on this host.
    pub(crate) const fn is_local(&self) -> bool {
        self.local
    }

    /// Sends `request`, whose URI is a path, and returns the answer when its head is there. The one before must have been read to its end.
    pub(crate) async fn send(&mut self, mut request: Request<Outgoing>) -> anyhow::Result<Response<Incoming>> {
        let headers = request.headers_mut();
        set_default(headers, header::HOST, self.api.authority())?;
        set_default(headers, header::USER_AGENT, concat!("stasis/", env!("CARGO_PKG_VERSION")))?;
        if let Some(key) = self.api.key() {
            set_default(headers, API_KEY, key)?;
        }
        self.sender.ready().await.map_err(|error| explain(&error, &self.api))?;
        self.sender.send_request(request).await.map_err(|error| explain(&error, &self.api))
    }
}

/// Sends `request`, whose URI is a path, over a connection of its own.
pub(crate) async fn send(api: &ApiUrl, request: Request<Outgoing>) -> anyhow::Result<Response<Incoming>> {
    Connection::open(api).await?.send(request).await
}

/// What is left of an answer.
pub(crate) async fn read(answer: Incoming) -> anyhow::Result<Bytes> {
    let body = Limited::new(answer, MAX_JSON).collect().await;
    Ok(body.map_err(|error| anyhow::anyhow!("the gateway's answer broke off: {error}"))?.to_bytes())
}

/// What an error's body says, for a person.
pub(crate) fn reason(body: &[u8]) -> Option<String> {
    let json: serde_json::Value = serde_json::from_slice(body).ok()?;
    let message = json["error"]["message"].as_str()?;
    Some(match json["request_id"].as_str() {
        Some(id) => format!("{message} (request {id})"),
        None => message.to_owned(),
    })
}

/// An answer that is no success, as an error.
pub(crate) async fn refusal(answer: Response<Incoming>) -> anyhow::Error {
    let status = answer.status();
    let body = read(answer.into_body()).await.unwrap_or_default();
    anyhow::anyhow!(reason(&body).unwrap_or_else(|| format!("the gateway answered {status}")))
}

async fn connect(api: &ApiUrl) -> anyhow::Result<TcpStream> {
    match timeout(CONNECT, TcpStream::connect(api.address())).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
            bail!("nothing listens on {api}: start it with `make up` or `stasis up`")
        }
        Ok(Err(error)) => Err(error).with_context(|| format!("cannot connect to {api}")),
        Err(_) => bail!("{api} does not answer: no connection within {CONNECT:?}"),
    }
}

fn set_default(headers: &mut http::HeaderMap, name: HeaderName, value: &str) -> anyhow::Result<()> {
    if !headers.contains_key(&name) {
        headers.insert(name, HeaderValue::from_str(value)?);
    }
    Ok(())
}

fn explain(error: &hyper::Error, api: &ApiUrl) -> anyhow::Error {
    // The body's own failure (a file that cannot be read) is the reason then.
    match error.source().filter(|_| error.is_user()) {
        Some(source) => anyhow::anyhow!("the request's body could not be sent: {source}"),
        None => anyhow::anyhow!("no answer from {api}: {error}; see whether `stasis up` still runs, and its log"),
    }
}
