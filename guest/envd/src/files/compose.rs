//! `POST /files/compose`: several files become one.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::fchown,
    path::{Path, PathBuf},
};

use axum::{
    body::{Body, to_bytes},
    extract::State,
    response::{IntoResponse, Response},
};
use http::StatusCode;
use serde::Deserialize;
use uuid::Uuid;

use crate::{
    answer::{self, Refusal},
    connect::value,
    envd::Envd,
    files::{
        target::Caller,
        write::{self, Written, bad, blocking, unwritten},
    },
    folders,
    users::User,
};

/// Most bytes of the request.
const LARGEST: usize = 1024 * 1024;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Compose {
    #[serde(deserialize_with = "value::default")]
    source_paths: Vec<String>,
    #[serde(deserialize_with = "value::default")]
    destination: String,
    username: Option<String>,
}

pub(super) async fn answer(State(envd): State<Envd>, body: Body) -> Response {
    match compose(&envd, body).await {
        Ok(written) => answer::json(StatusCode::OK, &written),
        Err(refusal) => refusal.into_response(),
    }
}

async fn compose(envd: &Envd, body: Body) -> Result<Written, Refusal> {
    let bytes = to_bytes(body, LARGEST).await.map_err(|error| bad(format!("invalid request body: {error}")))?;
    let request: Compose =
        serde_json::from_slice(&bytes).map_err(|error| bad(format!("invalid request body: {error}")))?;
    if request.source_paths.is_empty() {
        return Err(bad("source_paths must not be empty".into()));
    }
    if request.destination.is_empty() {
        return Err(bad("destination is required".into()));
    }
    let caller = Caller::named(envd, request.username.as_deref())?;
    let destination = caller.path(&request.destination)?;
    let mut sources = Vec::new();
    for source in &request.source_paths {
        let path = caller.path(source)?;
        if path == destination {
            return Err(bad(format!("source path \"{source}\" cannot be the same as destination")));
        }
        sources.push(path);
    }
    blocking(move || join(&sources, destination, &caller.user)).await
}

/// Beside the destination first, so that what is there stays whole if this fails.
fn join(sources: &[PathBuf], destination: PathBuf, user: &User) -> Result<Written, Refusal> {
    for source in sources {
        match fs::metadata(source) {
            Ok(metadata) if metadata.is_file() => {}
            Ok(_) => return Err(bad(format!("source path is not a regular file: {}", source.display()))),
            Err(_) => {
                return Err(Refusal::new(
                    StatusCode::NOT_FOUND,
                    format!("source file not found: {}", source.display()),
                ));
            }
        }
    }
    if destination.is_dir() {
        return Err(bad(format!("path is a directory: {}", destination.display())));
    }
    if let Some(folder) = destination.parent() {
        folders::ensure(folder, user).map_err(|error| unwritten(&error))?;
    }
    let mut beside = destination.clone().into_os_string();
    beside.push(format!(".e2b-compose.{}.tmp", Uuid::new_v4().simple()));
    let beside = PathBuf::from(beside);
    if let Err(error) = copy(sources, &beside, user).and_then(|()| fs::rename(&beside, &destination)) {
        // Perhaps it was not made at all.
        let _ = fs::remove_file(&beside);
        return Err(unwritten(&error));
    }
    for source in sources {
        // It is where it belongs, also if one of its parts cannot be removed.
        let _ = fs::remove_file(source);
    }
    Ok(Written::new(destination, std::collections::BTreeMap::new()))
}

fn copy(sources: &[PathBuf], to: &Path, user: &User) -> io::Result<()> {
    let mut file = write::open(to)?;
    fchown(&file, Some(user.uid), Some(user.gid))?;
    for source in sources {
        // The kernel copies, without us seeing the bytes.
        io::copy(&mut File::open(source)?, &mut file)?;
    }
    Ok(())
}
