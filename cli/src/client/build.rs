//! `stasis template build`: sends the folder, and shows what becomes of it.

use std::{io::Write, path::Path};

use anyhow::{Context as _, bail};
use http::{Request, StatusCode, header};
use http_body_util::BodyExt as _;
use stasis_pool_api::{BuildEvent, BuildFailure, BuildStep, TemplateInfo};

use super::{
    Outcome, Terminal,
    archive::Folder,
    body::Outgoing,
    http as api, print,
    template::{seconds, short},
    url::ApiUrl,
};

pub(super) async fn run(url: &ApiUrl, dir: &Path, json: bool, terminal: &mut Terminal) -> anyhow::Result<Outcome> {
    let folder = Folder::open(dir)?;
    let name = folder.spec.name.clone();
    let archive = Outgoing::made(None, move |out| folder.write(out));
    let request = Request::post("/v1/templates").header(header::CONTENT_TYPE, "application/x-tar").body(archive)?;
    let answer = api::send(url, request).await?;
    if answer.status() != StatusCode::OK {
        return Err(api::refusal(answer).await.context(format!("template {name} was not built")));
    }

    let mut body = answer.into_body();
    let mut unfinished = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.context("the build's events broke off; it may still run, see `stasis template list`")?;
        unfinished.extend_from_slice(&frame.into_data().unwrap_or_default());
        while let Some(end) = unfinished.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = unfinished.drain(..=end).collect();
            let event = serde_json::from_slice(&line).context("the gateway's event is not understood")?;
            if json {
                print(&mut terminal.out, &line)?;
            }
            if let Some(outcome) = show(event, json, terminal)? {
                return Ok(outcome);
            }
        }
    }
    bail!("the build's events ended before the build; it may still run, see `stasis template list`")
}

/// Shows one event, and says how the build ended where it did.
fn show(event: BuildEvent, json: bool, terminal: &mut Terminal) -> anyhow::Result<Option<Outcome>> {
    let err = &mut terminal.err;
    match event {
        BuildEvent::Step { step, elapsed_ms } => {
            let (number, of) = position(step);
            writeln!(err, "[{:>7}] {number}/{of} {} …", seconds(elapsed_ms), step.describe())?;
            Ok(None)
        }
        BuildEvent::Built { template, unchanged } => {
            if !json {
                print(&mut terminal.out, result(&template, unchanged).as_bytes())?;
            }
            Ok(Some(Outcome::Success))
        }
        BuildEvent::Failed(failure) => {
            explain(&failure, err)?;
            Ok(Some(Outcome::Failure))
        }
    }
}

const fn position(step: BuildStep) -> (u8, u8) {
    let number = match step {
        BuildStep::Disk => 1,
        BuildStep::Boot => 2,
        BuildStep::Start => 3,
        BuildStep::Snapshot => 4,
        BuildStep::Publish => 5,
    };
    (number, 5)
}

fn result(info: &TemplateInfo, unchanged: bool) -> String {
    let name = &info.spec.name;
    let (digest, took) = (short(&info.digest), seconds(info.build_ms));
    let mib = info.memory_bytes.div_ceil(1 << 20);
    if unchanged {
        format!("{name} is unchanged: digest {digest}, {mib} MiB of memory in its snapshot\n")
    } else {
        format!("{name} is built: digest {digest}, in {took}, {mib} MiB of memory in its snapshot\n")
    }
}

/// The reason first, then what the function and its kernel printed.
fn explain(failure: &BuildFailure, err: &mut dyn Write) -> std::io::Result<()> {
    writeln!(err, "the template was not built: {failure}")?;
    let (output, console) = match failure {
        BuildFailure::NotReady { output, console, .. } => (Some(output), Some(console)),
        BuildFailure::Platform { console, .. } => (None, Some(console)),
        BuildFailure::Invalid { .. } | BuildFailure::NoCapacity { .. } => (None, None),
    };
    for (title, text) in [("what the command printed", output), ("the console's end", console)] {
        if let Some(text) = text.map(|text| text.trim_end()) {
            writeln!(err, "--- {title} ---\n{}", if text.is_empty() { "(nothing)" } else { text })?;
        }
    }
    Ok(())
}
