//! `GET /files`.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Cursor, Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::SystemTime,
};

use axum::{
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use flate2::{Compression, read::GzEncoder};
use futures_util::{Stream, stream::unfold};
use http::{
    HeaderMap, HeaderValue, StatusCode, Uri,
    header::{
        ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderName,
        IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, LAST_MODIFIED, RANGE, VARY,
    },
};
use rustix::fs::OFlags;

use crate::{
    answer::Refusal,
    envd::Envd,
    files::{
        PIECE, content,
        encoding::{self, Encoding},
        range::{self, Part},
        sign::Operation,
        target,
        write::blocking,
    },
};

pub(super) async fn answer(State(envd): State<Envd>, headers: HeaderMap, uri: Uri) -> Response {
    match read(&envd, &headers, &uri).await {
        Ok(response) => response,
        Err(refusal) => refusal.into_response(),
    }
}

async fn read(envd: &Envd, headers: &HeaderMap, uri: &Uri) -> Result<Response, Refusal> {
    let (query, caller) = target::allowed(envd, headers, uri, Operation::Read)?;
    let path = caller.path(query.path.as_deref().unwrap_or_default())?;
    let accepted = encoding::accepted(headers)?;
    let place = path.clone();
    let mut opened = blocking(move || open(&place)).await?;

    let mut response = Response::new(Body::empty());
    let told = response.headers_mut();
    told.insert(CONTENT_TYPE, HeaderValue::from_static(content::media_type(&path, &opened.first)));
    told.insert(CONTENT_DISPOSITION, content::disposition(&path));
    told.insert(VARY, HeaderValue::from_static("Accept-Encoding"));
    let modified = opened.modified.map(httpdate::fmt_http_date);
    if let Some(modified) = modified.as_deref().and_then(|date| HeaderValue::from_str(date).ok()) {
        told.insert(LAST_MODIFIED, modified);
    }
    if is_unmodified(headers, opened.modified) {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        return Ok(response);
    }
    // Parts are of the file itself.
    let is_whole = [RANGE, IF_RANGE, IF_NONE_MATCH, IF_MODIFIED_SINCE].iter().all(|name| !headers.contains_key(name));
    if accepted == Encoding::Gzip && is_whole {
        told.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        let whole = Cursor::new(opened.first).chain(opened.file);
        *response.body_mut() = Body::from_stream(pieces(GzEncoder::new(whole, Compression::fast()), None));
        return Ok(response);
    }
    let Some(size) = opened.size else {
        *response.body_mut() = Body::from_stream(pieces(Cursor::new(opened.first).chain(opened.file), None));
        return Ok(response);
    };
    told.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    match part(headers, size, modified.as_deref()) {
        Part::Whole => {
            told.insert(CONTENT_LENGTH, size.into());
            *response.body_mut() = Body::from_stream(pieces(Cursor::new(opened.first).chain(opened.file), Some(size)));
        }
        Part::Bytes(range) => {
            let length = range.end - range.start;
            told.insert(CONTENT_LENGTH, length.into());
            told.insert(CONTENT_RANGE, content_range(&format!("{}-{}", range.start, range.end - 1), size));
            *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            let sought = opened.file.seek(SeekFrom::Start(range.start)).map_err(|error| unread(&path, &error))?;
            let first = usize::try_from(sought).ok().and_then(|start| opened.first.get(start..)).unwrap_or_default();
            // What was read already is not read again: of small files of the kernel's there is no second time.
            let rest =
                if first.is_empty() { SeekFrom::Start(sought) } else { SeekFrom::Start(opened.first.len() as u64) };
            opened.file.seek(rest).map_err(|error| unread(&path, &error))?;
            let bytes = Cursor::new(Bytes::copy_from_slice(first)).chain(opened.file);
            *response.body_mut() = Body::from_stream(pieces(bytes, Some(length)));
        }
        Part::Beyond => {
            let message = "invalid range: failed to overlap";
            let mut refusal = Refusal::new(StatusCode::RANGE_NOT_SATISFIABLE, message).into_response();
            refusal.headers_mut().insert(CONTENT_RANGE, content_range("*", size));
            return Ok(refusal);
        }
    }
    Ok(response)
}

/// A file, and what is known of it.
struct Opened {
    file: File,
    /// Read already.
    first: Bytes,
    /// None where it is not known before the end: files of the kernel's say 0, or a page.
    size: Option<u64>,
    modified: Option<SystemTime>,
}

fn open(path: &Path) -> Result<Opened, Refusal> {
    let bad = |what: &str| Refusal::new(StatusCode::BAD_REQUEST, format!("path '{}' is {what}", path.display()));
    // Before it is opened, which may have effects where it is not a file.
    let metadata = fs::metadata(path).map_err(|error| unread(path, &error))?;
    if metadata.is_dir() {
        return Err(bad("a directory"));
    }
    if !metadata.is_file() {
        return Err(bad("not a regular file"));
    }
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let mut file =
        OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|error| unread(path, &error))?;
    let metadata = file.metadata().map_err(|error| unread(path, &error))?;
    let mut first = Vec::new();
    (&mut file).take(PIECE as u64).read_to_end(&mut first).map_err(|error| unread(path, &error))?;
    let read = first.len() as u64;
    let size = if first.len() < PIECE { Some(read) } else { Some(metadata.len()).filter(|size| *size >= read) };
    Ok(Opened { file, first: first.into(), size, modified: metadata.modified().ok().filter(is_writable) })
}

/// Whether HTTP can write this time: it must not panic over one that a guest made up.
fn is_writable(time: &SystemTime) -> bool {
    let year_10000 = std::time::Duration::from_secs(253_402_300_800);
    time.duration_since(SystemTime::UNIX_EPOCH).is_ok_and(|since| since < year_10000)
}

fn unread(path: &Path, error: &io::Error) -> Refusal {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            Refusal::new(StatusCode::NOT_FOUND, format!("path '{}' does not exist", path.display()))
        }
        io::ErrorKind::PermissionDenied => {
            Refusal::new(StatusCode::FORBIDDEN, format!("error opening file '{}': {error}", path.display()))
        }
        io::ErrorKind::InvalidFilename | io::ErrorKind::InvalidInput => {
            Refusal::new(StatusCode::BAD_REQUEST, format!("error opening file '{}': {error}", path.display()))
        }
        _ => {
            Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, format!("error opening file '{}': {error}", path.display()))
        }
    }
}

fn is_unmodified(headers: &HeaderMap, modified: Option<SystemTime>) -> bool {
    let since = text(headers, IF_MODIFIED_SINCE).and_then(|date| httpdate::parse_http_date(date).ok());
    match (since, modified) {
        // The header has whole seconds. Who names a tag as well is not asking for the date: we have none.
        (Some(since), Some(modified)) if !headers.contains_key(IF_NONE_MATCH) => {
            modified.duration_since(since).is_ok_and(|later| later.as_secs() == 0) || modified <= since
        }
        _ => false,
    }
}

/// What is asked of a file, if that is still the one that was asked about before.
fn part(headers: &HeaderMap, size: u64, modified: Option<&str>) -> Part {
    match (text(headers, RANGE), text(headers, IF_RANGE)) {
        (Some(range), None) => range::parse(range, size),
        (Some(range), Some(date)) if Some(date) == modified => range::parse(range, size),
        _ => Part::Whole,
    }
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

fn content_range(part: &str, size: u64) -> HeaderValue {
    HeaderValue::from_str(&format!("bytes {part}/{size}")).unwrap_or(HeaderValue::from_static("bytes"))
}

/// Pieces of so many bytes, or of all: each is read when it is asked for, on a thread that may block. Where the file has become shorter than
/// was told, the answer breaks off.
fn pieces(reader: impl Read + Send + 'static, length: Option<u64>) -> impl Stream<Item = io::Result<Bytes>> {
    unfold(Some((reader, length)), |state| async move {
        let (mut reader, left) = state?;
        let most = left.map_or(PIECE as u64, |left| left.min(PIECE as u64));
        if most == 0 {
            return None;
        }
        let read = tokio::task::spawn_blocking(move || {
            let mut piece = Vec::with_capacity(usize::try_from(most).unwrap_or(PIECE));
            let read = (&mut reader).take(most).read_to_end(&mut piece);
            (read.map(|_| piece), reader)
        });
        match read.await {
            Ok((Ok(piece), reader)) => {
                let count = piece.len() as u64;
                match left {
                    None if count == 0 => None,
                    None => Some((Ok(piece.into()), Some((reader, None)))),
                    Some(_) if count == 0 => Some((Err(io::ErrorKind::UnexpectedEof.into()), None)),
                    Some(left) => Some((Ok(piece.into()), Some((reader, Some(left - count))))),
                }
            }
            Ok((Err(error), _)) => Some((Err(error), None)),
            Err(error) => Some((Err(io::Error::other(error)), None)),
        }
    })
}
