//! `stasis sandbox exec | logs`.

use std::io::Read as _;

use anyhow::{Context as _, bail};
use bytes::BytesMut;
use http::{Method, Request};
use http_body_util::BodyExt as _;
use stasis_pool_api::{Command, CommandEvent, MOST_INPUT, SandboxLogs, Written};

use super::{Outcome, Terminal, answer::get, body::Outgoing, http as api, print, url::ApiUrl};

/// What a shell adds to a signal's number for its status.
const SIGNALLED: i32 = 128;

/// A command in a sandbox.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ExecArgs {
    /// Its id
    pub(super) id: String,
    /// A variable beside the function's; may be repeated
    #[arg(long, short, value_name = "NAME=VALUE", value_parser = super::sandbox::note)]
    env: Vec<(String, String)>,
    /// Where it runs; the function's directory if not given
    #[arg(long, value_name = "DIR")]
    directory: Option<String>,
    /// Read our standard input to its end, and give it to the command
    #[arg(long)]
    stdin: bool,
    /// Print the gateway's events as JSON lines
    #[arg(long)]
    json: bool,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Prints what it prints; its status is ours.
pub(super) async fn exec(url: &ApiUrl, args: ExecArgs, terminal: &mut Terminal) -> anyhow::Result<Outcome> {
    let ExecArgs { id, env, directory, stdin, json, command } = args;
    let stdin = if stdin { input()? } else { String::new() };
    let command = Command { command, env: env.into_iter().collect(), directory, stdin };
    let body = Outgoing::whole(serde_json::to_vec(&command)?.into());
    let request = Request::builder().method(Method::POST).uri(format!("/v1/sandboxes/{id}/exec")).body(body)?;
    let answer = api::send(url, request).await?;
    if !answer.status().is_success() {
        return Err(api::refusal(answer).await);
    }
    let mut body = answer.into_body();
    let mut arrived = BytesMut::new();
    let mut outcome = None;
    while let Some(frame) = body.frame().await {
        arrived.extend_from_slice(&frame.context("the gateway's answer broke off")?.into_data().unwrap_or_default());
        while let Some(end) = arrived.iter().position(|byte| *byte == b'\n') {
            let line = arrived.split_to(end + 1);
            if json {
                print(&mut terminal.out, &line)?;
            }
            let event = serde_json::from_slice(&line).context("an event of the command is not understood")?;
            outcome = show(event, json, terminal)?;
        }
    }
    outcome.context("the gateway's answer ended before the command")
}

/// How it ended, if this is its end.
fn show(event: CommandEvent, json: bool, terminal: &mut Terminal) -> anyhow::Result<Option<Outcome>> {
    match event {
        CommandEvent::Stdout(Written(_)) | CommandEvent::Stderr(Written(_)) if json => {}
        CommandEvent::Stdout(Written(bytes)) => print(&mut terminal.out, &bytes)?,
        CommandEvent::Stderr(Written(bytes)) => print(&mut terminal.err, &bytes)?,
        CommandEvent::Exited { status } => return Ok(Some(Outcome::Status(status))),
        CommandEvent::Killed { signal } => return Ok(Some(Outcome::Status(SIGNALLED + signal))),
        CommandEvent::Lost { reason } => bail!("the command is lost: {reason}"),
    }
    Ok(None)
}

fn input() -> anyhow::Result<String> {
    let mut text = String::new();
    let most = MOST_INPUT as u64 + 1;
    std::io::stdin().take(most).read_to_string(&mut text).context("the standard input, which must be UTF-8")?;
    if text.len() > MOST_INPUT {
        bail!("the standard input is longer than {MOST_INPUT} bytes");
    }
    Ok(text)
}

/// Prints what its function has printed, then its console.
pub(super) async fn logs(url: &ApiUrl, id: &str, json: bool, terminal: &mut Terminal) -> anyhow::Result<Outcome> {
    let answer = get(url, &format!("/v1/sandboxes/{id}/logs")).await?;
    super::answer::show(terminal, json, &answer, said)
}

fn said(SandboxLogs { output, console }: SandboxLogs) -> String {
    let part = |name: &str, text: Option<String>, lacking: &str| match text {
        Some(text) => format!("--- {name}\n{text}{}", if text.is_empty() || text.ends_with('\n') { "" } else { "\n" }),
        None => format!("--- {name}: {lacking}\n"),
    };
    part("output", output, "not known while it does not run")
        + &part("console", console, "none, since it has no process")
}
