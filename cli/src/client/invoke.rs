//! `stasis invoke`: one request to a function, streamed in and out.

use std::{io::Write, path::Path, str::FromStr, time::Instant};

use anyhow::Context as _;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Response, header};
use http_body_util::BodyExt as _;
use stasis_pool_api::TemplateName;

use super::{Outcome, Terminal, body::Outgoing, http as api, print, url::ApiUrl};

/// How much of an error's body is kept to find its reason.
const REASON: usize = 64 << 10;

/// Invoke a function and print its answer.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct InvokeCommand {
    /// The function's template
    template: TemplateName,
    /// Path and query, percent-encoded
    #[arg(default_value = "/")]
    path: String,
    /// Method; without one, POST with data and GET without
    #[arg(short = 'X', long, value_name = "METHOD")]
    request: Option<Method>,
    /// The body: a value, @FILE, or @- for the standard input
    #[arg(short, long, value_name = "VALUE|@FILE|@-")]
    data: Option<String>,
    /// A header, as 'Name: value'
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE")]
    headers: Vec<HeaderLine>,
    /// Print the answer's head too
    #[arg(short, long)]
    include: bool,
    /// Say on the standard error which VM answered, and where the time went
    #[arg(short, long)]
    verbose: bool,
}

/// `Name: value`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HeaderLine(HeaderName, HeaderValue);

impl FromStr for HeaderLine {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let (name, value) = line.split_once(':').ok_or("write a header as 'Name: value'")?;
        let name = name.trim().parse().map_err(|_| format!("{name:?} is not a header's name"))?;
        let value = value.trim().parse().map_err(|_| format!("{value:?} is not a header's value"))?;
        Ok(Self(name, value))
    }
}

pub(super) async fn run(url: &ApiUrl, command: InvokeCommand, terminal: &mut Terminal) -> anyhow::Result<Outcome> {
    let (include, verbose) = (command.include, command.verbose);
    let request = command.into_request()?;
    let begun = Instant::now();
    let answer = api::send(url, request).await?;
    if include {
        print(&mut terminal.out, head(&answer).as_bytes())?;
    }

    let (parts, mut body) = answer.into_parts();
    let failed = parts.status.as_u16() >= 400;
    let (mut kept, mut bytes) = (Vec::new(), 0);
    while let Some(frame) = body.frame().await {
        let frame = frame.with_context(|| format!("the answer broke off after {bytes} bytes"))?;
        let data = frame.into_data().unwrap_or_default();
        bytes += data.len();
        print(&mut terminal.out, &data)?;
        if failed {
            kept.extend_from_slice(&data[..data.len().min(REASON - kept.len())]);
        }
    }
    if verbose {
        tell_timing(&parts.headers, begun, &mut terminal.err)?;
    }
    if !failed {
        return Ok(Outcome::Success);
    }
    match api::reason(&kept) {
        Some(reason) => writeln!(terminal.err, "HTTP {}: {reason}", parts.status)?,
        None => writeln!(terminal.err, "HTTP {}", parts.status)?,
    }
    Ok(Outcome::Failure)
}

impl InvokeCommand {
    fn into_request(self) -> anyhow::Result<Request<Outgoing>> {
        let has_data = self.data.is_some();
        let body = match self.data.as_deref() {
            None => Outgoing::empty(),
            Some("@-") => Outgoing::stdin(),
            Some(data) => match data.strip_prefix('@') {
                Some(file) => Outgoing::file(Path::new(file))?,
                None => Outgoing::whole(Bytes::copy_from_slice(data.as_bytes())),
            },
        };
        let method = self.request.unwrap_or(if has_data { Method::POST } else { Method::GET });
        let slash = if self.path.starts_with('/') { "" } else { "/" };
        let uri = format!("/invoke/{}{slash}{}", self.template, self.path);
        let mut request = Request::builder().method(method).uri(&uri).body(body).with_context(|| {
            format!("{:?} is not a URL's path: percent-encode what does not belong into one", self.path)
        })?;
        for HeaderLine(name, value) in self.headers {
            request.headers_mut().append(name, value);
        }
        if has_data && !request.headers().contains_key(header::CONTENT_TYPE) {
            request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
        }
        Ok(request)
    }
}

fn head<B>(answer: &Response<B>) -> String {
    let mut text = format!("{:?} {}\n", answer.version(), answer.status());
    for (name, value) in answer.headers() {
        text.push_str(&format!("{name}: {}\n", String::from_utf8_lossy(value.as_bytes())));
    }
    text.push('\n');
    text
}

fn tell_timing(headers: &http::HeaderMap, begun: Instant, err: &mut dyn Write) -> std::io::Result<()> {
    let total = begun.elapsed();
    writeln!(err, "total: {:.3} ms", total.as_secs_f64() * 1e3)?;
    for name in ["x-stasis-start", "x-stasis-vm", "x-request-id", "server-timing"] {
        for value in headers.get_all(name) {
            writeln!(err, "{name}: {}", String::from_utf8_lossy(value.as_bytes()))?;
        }
    }
    Ok(())
}
