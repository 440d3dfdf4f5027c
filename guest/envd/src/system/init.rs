//! What the daemon is told when a sandbox begins, or goes on.
//!
//! Through the owner's door it always holds. Through the public one it holds when no token is set yet, or when it brings the token that is
//! set: who is inside cannot take the sandbox from who made it. One that is older than another that was taken is passed over.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use axum::{
    body::{Body, to_bytes},
    extract::State,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, HeaderValue, StatusCode, header::CACHE_CONTROL};
use serde::Deserialize;

use crate::{
    access::{self, Token},
    answer::Refusal,
    connect::value,
    envd::{Envd, Settings},
    server::Door,
    system::Through,
};

/// Most bytes of it.
const LARGEST: usize = 1024 * 1024;
/// A clock that is so little behind, or so little ahead, is left alone.
const BEHIND: Duration = Duration::from_millis(50);
const AHEAD: Duration = Duration::from_secs(5);

/// What is not ours to use (certificates, mounts, addresses of E2B's own services) is passed over.
#[derive(Deserialize)]
#[serde(default, rename_all = "camelCase")]
#[derive(Default)]
struct Init {
    env_vars: Option<BTreeMap<String, String>>,
    access_token: Option<String>,
    timestamp: Option<String>,
    #[serde(deserialize_with = "value::default")]
    default_user: String,
    #[serde(deserialize_with = "value::default")]
    default_workdir: String,
}

pub(super) async fn answer(State(envd): State<Envd>, door: Through, headers: HeaderMap, body: Body) -> Response {
    let told = async {
        let bad = |message: String| Refusal::new(StatusCode::BAD_REQUEST, message);
        let bytes = to_bytes(body, LARGEST).await.map_err(|error| bad(format!("invalid request body: {error}")))?;
        // Nothing at all is the same as nothing new.
        let text = str::from_utf8(&bytes).map_err(|_| bad("invalid request body: invalid UTF-8".into()))?;
        let text = if text.trim().is_empty() { "{}" } else { text };
        // Where it is wrong is told, not what it holds.
        let init: Init = serde_json::from_str(text)
            .map_err(|error| bad(format!("invalid request body at line {} column {}", error.line(), error.column())))?;
        take(&envd, door.0, &headers, init)
    };
    match told.await {
        Ok(()) => (StatusCode::NO_CONTENT, [(CACHE_CONTROL, HeaderValue::from_static("no-store"))]).into_response(),
        Err(refusal) => refusal.into_response(),
    }
}

fn take(envd: &Envd, door: Door, headers: &HeaderMap, init: Init) -> Result<(), Refusal> {
    let time = init.timestamp.as_deref().map(parse_time).transpose()?;
    let mut settings = envd.settings();
    if door == Door::Public {
        prove(&settings, headers, init.access_token.as_deref())?;
    }
    if let Some(time) = time {
        if settings.told_at.is_some_and(|last| time < last) {
            return Ok(());
        }
        settings.told_at = Some(time);
    }
    if let Some(envs) = init.env_vars {
        settings.envs = envs;
    }
    if let Some(token) = init.access_token.filter(|token| !token.is_empty()) {
        settings.token = Some(Token::new(token));
    } else if door == Door::Owner {
        settings.token = None;
    }
    if !init.default_user.is_empty() {
        settings.default_user = init.default_user;
    }
    if !init.default_workdir.is_empty() {
        settings.workdir = Some(init.default_workdir.into());
    }
    drop(settings);
    match time {
        Some(time) if is_off(SystemTime::now(), time) => (envd.config().clock)(time).map_err(|error| {
            Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, format!("the clock cannot be set: {error}"))
        }),
        _ => Ok(()),
    }
}

/// That whoever sends it has the token that is set, in the body or the header.
fn prove(settings: &Settings, headers: &HeaderMap, token: Option<&str>) -> Result<(), Refusal> {
    let Some(set) = &settings.token else { return Ok(()) };
    let header = headers.get(access::HEADER).map(HeaderValue::as_bytes);
    match token.map(str::as_bytes).or(header) {
        Some(given) if set.is(given) => Ok(()),
        Some(_) => Err(Refusal::new(StatusCode::UNAUTHORIZED, "access token validation failed")),
        None => Err(Refusal::new(StatusCode::UNAUTHORIZED, "access token reset not authorized")),
    }
}

fn parse_time(text: &str) -> Result<SystemTime, Refusal> {
    humantime::parse_rfc3339(text).map_err(|_| {
        Refusal::new(StatusCode::BAD_REQUEST, "invalid timestamp: write it as 2026-01-31T23:59:59.5Z, in UTC")
    })
}

/// Whether a clock that shows `now` is to be set to `time`.
fn is_off(now: SystemTime, time: SystemTime) -> bool {
    match time.duration_since(now) {
        Ok(behind) => behind > BEHIND,
        Err(ahead) => ahead.duration() > AHEAD,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_set_only_when_it_is_off() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        for (time, wanted) in [
            (now, false),
            (now + BEHIND, false),
            (now + BEHIND + Duration::from_nanos(1), true),
            (now - AHEAD, false),
            (now - AHEAD - Duration::from_nanos(1), true),
        ] {
            assert_eq!(is_off(now, time), wanted);
        }
    }

    #[test]
    fn times_are_in_utc() {
        assert_eq!(parse_time("1970-01-01T00:00:01.5Z").unwrap(), SystemTime::UNIX_EPOCH + Duration::from_millis(1500));
        for wrong in ["", "now", "1970-01-01T00:00:01+01:00", "1970-13-01T00:00:01Z"] {
            assert_eq!(parse_time(wrong).unwrap_err().status, StatusCode::BAD_REQUEST, "{wrong}");
        }
    }
}
