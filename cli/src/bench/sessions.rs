//! Many requests at once to a paused sandbox.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use futures_util::future::try_join_all;
use http::{Method, Request, StatusCode};
use serde_json::{Value, json};
use stasis_loadtest::{Histogram, Row, Unit};
use stasis_pool_api::TemplateName;

use crate::client::{
    ApiUrl, Outgoing,
    http::{self as api, Connection},
};

const REQUESTS: usize = 64;
/// Rounds at most, and how long they may take, though one is always made: where guest kernels are interpreted, one takes many seconds. So many
/// that the median of their ratios does not hang on a disturbance.
const ROUNDS: usize = 25;
const LENGTH: Duration = Duration::from_secs(15);
/// How much later than the first the last answer may come.
const TIMES_THE_FIRST: f64 = 1.5;

/// What is asked of the sandbox.
#[derive(Debug)]
pub(super) struct Asked {
    /// The path.
    pub(super) path: String,
    /// Behind the rows' names.
    pub(super) named: &'static str,
    /// How long the function works on each request, beside the others, if that is known.
    pub(super) works: Option<Duration>,
}

/// For each way to pause: when the first answer had come, and when the last.
pub(super) async fn resumes(url: &ApiUrl, template: &TemplateName, asked: &Asked) -> anyhow::Result<Vec<Row>> {
    let new = json!({ "template": template, "timeout": "1h", "idle": "0s", "hibernate_after": "0s" });
    let made = command(url, Method::POST, "/v1/sandboxes", &new).await?;
    let id = made["id"].as_str().context("a sandbox without id")?.to_owned();
    let measured = measure(url, template, &id, asked).await;
    // Whatever came of it.
    command(url, Method::DELETE, &format!("/v1/sandboxes/{id}"), &Value::Null).await?;
    measured
}

async fn measure(url: &ApiUrl, template: &TemplateName, id: &str, asked: &Asked) -> anyhow::Result<Vec<Row>> {
    let Asked { path, named, works } = asked;
    let path = format!("/sandbox/{id}{path}");
    let works = match works {
        Some(time) => format!("the function works {time:?} on each, beside the others"),
        None => "the function answers at once".into(),
    };
    let mut rows = Vec::new();
    // The running one tells how much of the rest is the guest's own: the same requests, and no resume.
    for (to, state) in [(Some("ram"), "suspended"), (Some("disk"), "hibernated"), (None, "running")] {
        let [mut first, mut last] = [Histogram::new(Unit::Millis), Histogram::new(Unit::Millis)];
        let mut ratios = Vec::new();
        let started = Instant::now();
        for round in 0..ROUNDS {
            if round > 0 && started.elapsed() > LENGTH {
                break;
            }
            if let Some(to) = to {
                command(url, Method::POST, &format!("/v1/sandboxes/{id}/pause"), &json!({ "to": to })).await?;
            }
            let mut connections = Vec::new();
            for _ in 0..REQUESTS {
                connections.push(Connection::open(url).await?);
            }
            let begun = Instant::now();
            let answers = connections.into_iter().map(|connection| answered(connection, &path, begun));
            let times = try_join_all(answers).await?;
            if let (Some(earliest), Some(latest)) = (times.iter().min(), times.iter().max()) {
                first.record_time(*earliest);
                last.record_time(*latest);
                ratios.push(latest.as_secs_f64() / earliest.as_secs_f64());
            }
        }
        let how = format!(
            "{REQUESTS} requests at once to one {state} sandbox of {}, {} times; {works}",
            template,
            first.len()
        );
        ratios.sort_by(f64::total_cmp);
        let ratio = ratios.get(ratios.len() / 2).copied().unwrap_or_default();
        let over = ratios.iter().filter(|ratio| **ratio > TIMES_THE_FIRST).count();
        let all = ratios.len();
        let target = match to {
            Some(_) => format!(
                "target: at most {TIMES_THE_FIRST} times the first's of its round; in the median {ratio:.2}, {over} of {all} over it"
            ),
            None => format!(
                "in the median {ratio:.2} times the first's of its round; no target: it is what the guest makes of so many"
            ),
        };
        rows.push(first.row(format!("session.resume64_first_ms.{state}{named}"), format!("{how}: the first answer")));
        rows.push(
            last.row(format!("session.resume64_last_ms.{state}{named}"), format!("{how}: the last answer; {target}")),
        );
    }
    Ok(rows)
}

async fn answered(mut connection: Connection, path: &str, begun: Instant) -> anyhow::Result<Duration> {
    let answer = connection.send(Request::get(path).body(Outgoing::empty())?).await?;
    let status = answer.status();
    let body = api::read(answer.into_body()).await?;
    if status != StatusCode::OK {
        bail!("a request to a paused sandbox: {}", api::reason(&body).unwrap_or_else(|| format!("HTTP {status}")));
    }
    Ok(begun.elapsed())
}

async fn command(url: &ApiUrl, method: Method, path: &str, body: &Value) -> anyhow::Result<Value> {
    let body = if body.is_null() { Outgoing::empty() } else { Outgoing::whole(body.to_string().into()) };
    let answer = api::send(url, Request::builder().method(method).uri(path).body(body)?).await?;
    if !answer.status().is_success() {
        return Err(api::refusal(answer).await);
    }
    let body = api::read(answer.into_body()).await?;
    Ok(if body.is_empty() { Value::Null } else { serde_json::from_slice(&body)? })
}
