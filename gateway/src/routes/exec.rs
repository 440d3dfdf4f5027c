//! Commands in a sandbox, and what its function has printed.

use std::{io, mem};

use axum::{
    Extension, Json,
    body::Body,
    extract::{Path, Request, State},
    response::IntoResponse,
};
use bytes::{Bytes, BytesMut};
use futures_util::{Stream, stream};
use http::header;
use stasis_pool_api::{Command, CommandEvent, CommandEvents, MOST_INPUT, SandboxLogs, Tenant, Written};

use super::{
    Api,
    sandboxes::{parse, read},
};
use crate::error::ApiError;

/// Most bytes of a command with its input, each of which JSON may write as six.
const MOST_COMMAND: usize = 6 * MOST_INPUT + (64 << 10);

/// One JSON line per event, as they happen. A caller that leaves ends the command.
pub(super) async fn exec(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
    request: Request,
) -> Result<impl IntoResponse, ApiError> {
    let command: Command = parse(&read(request, MOST_COMMAND).await?)?;
    let sandboxes = api.node.sandboxes(&tenant);
    let events = sandboxes.exec(&id, command, api.config.claim_budget).await.map_err(ApiError::Sandbox)?;
    let headers = [(header::CONTENT_TYPE, "application/x-ndjson"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, Body::from_stream(lines(events))))
}

pub(super) async fn logs(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    Path(id): Path<String>,
) -> Result<Json<SandboxLogs>, ApiError> {
    api.node.sandboxes(&tenant).logs(&id).await.map(Json).map_err(ApiError::Sandbox)
}

/// Beginnings of characters that are not whole yet, of standard output and error.
#[derive(Default)]
struct Halves([BytesMut; 2]);

impl Halves {
    /// The events that can be told now, given one more.
    fn complete(&mut self, event: CommandEvent) -> Vec<CommandEvent> {
        let [out, err] = &mut self.0;
        match event {
            CommandEvent::Stdout(Written(bytes)) => whole(out, &bytes).map(CommandEvent::Stdout).into_iter().collect(),
            CommandEvent::Stderr(Written(bytes)) => whole(err, &bytes).map(CommandEvent::Stderr).into_iter().collect(),
            last => {
                let left = |half: &mut BytesMut| (!half.is_empty()).then(|| Written(mem::take(half).freeze()));
                let rest = [left(out).map(CommandEvent::Stdout), left(err).map(CommandEvent::Stderr), Some(last)];
                rest.into_iter().flatten().collect()
            }
        }
    }
}

/// What was held back and `bytes`, without a character at its end that is not whole; that is held back.
fn whole(half: &mut BytesMut, bytes: &[u8]) -> Option<Written> {
    half.extend_from_slice(bytes);
    let all = mem::take(half);
    let end = match std::str::from_utf8(&all) {
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        _ => all.len(),
    };
    let mut told = all;
    *half = told.split_off(end);
    (!told.is_empty()).then(|| Written(told.freeze()))
}

fn lines(events: CommandEvents) -> impl Stream<Item = io::Result<Bytes>> + Send {
    stream::unfold(Some((events, Halves::default())), |open| async move {
        let (mut events, mut halves) = open?;
        let event = events.recv().await.unwrap_or_else(|| CommandEvent::Lost { reason: "the node stopped".into() });
        let more = matches!(event, CommandEvent::Stdout(_) | CommandEvent::Stderr(_));
        let mut text = Vec::new();
        for event in halves.complete(event) {
            if let Err(error) = serde_json::to_writer(&mut text, &event) {
                return Some((Err(io::Error::other(error)), None));
            }
            text.push(b'\n');
        }
        Some((Ok(text.into()), more.then_some((events, halves))))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_in_two_pieces_is_told_once_and_whole() {
        let out = |bytes: &'static [u8]| CommandEvent::Stdout(Written(Bytes::from_static(bytes)));
        let mut halves = Halves::default();
        assert_eq!(halves.complete(out(b"caf\xc3")), [out(b"caf")]);
        assert_eq!(halves.complete(CommandEvent::Stderr(Written("e".into()))).len(), 1, "its own stream");
        assert_eq!(halves.complete(out(b"\xa9")), [out("é".as_bytes())]);
        assert_eq!(halves.complete(out(b"\xe2\x82")), []);
        let end = CommandEvent::Exited { status: 0 };
        assert_eq!(halves.complete(end.clone()), [out(b"\xe2\x82"), end], "what never became one is told too");
        assert_eq!(halves.complete(out(b"a\xffb")), [out(b"a\xffb")], "what is no text is told as it is");
    }
}
