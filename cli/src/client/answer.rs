//! One request to the API, and its answer: as the gateway's JSON, or as text for people.

use anyhow::Context as _;
use bytes::Bytes;
use http::{Method, Request};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Outcome, Terminal, body::Outgoing, http as api, print, url::ApiUrl};

/// One request; its answer, if that is a success.
pub(super) async fn ask(url: &ApiUrl, method: Method, target: &str, body: &Value) -> anyhow::Result<Bytes> {
    let body = if body.is_null() { Outgoing::empty() } else { Outgoing::whole(body.to_string().into()) };
    let answer = api::send(url, Request::builder().method(method).uri(target).body(body)?).await?;
    if !answer.status().is_success() {
        return Err(api::refusal(answer).await);
    }
    api::read(answer.into_body()).await
}

/// Asks for what is at `target`.
pub(super) async fn get(url: &ApiUrl, target: &str) -> anyhow::Result<Bytes> {
    ask(url, Method::GET, target, &Value::Null).await
}

/// Prints an answer, as it came if `json`, else as `text` has it.
pub(super) fn show<T: DeserializeOwned>(
    terminal: &mut Terminal,
    json: bool,
    answer: &[u8],
    text: impl FnOnce(T) -> String,
) -> anyhow::Result<Outcome> {
    if json {
        print(&mut terminal.out, answer)?;
        print(&mut terminal.out, b"\n")?;
    } else {
        let answer = serde_json::from_slice(answer).context("the gateway's answer is not understood")?;
        print(&mut terminal.out, text(answer).as_bytes())?;
    }
    Ok(Outcome::Success)
}

/// All that is known of something, for people: JSON on many lines.
pub(super) fn all(value: Value) -> String {
    format!("{value:#}\n")
}
