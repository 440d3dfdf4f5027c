//! `POST /files`: one file as the body, or the files of a form.

use axum::{
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use http::{
    HeaderMap, StatusCode, Uri,
    header::{CONTENT_LENGTH, CONTENT_TYPE},
};

use crate::{
    answer::{self, Refusal},
    envd::Envd,
    files::{
        encoding,
        sign::Operation,
        target::{self, Caller, Query},
        write::{self, How, Written, bad},
    },
};

pub(super) async fn answer(State(envd): State<Envd>, headers: HeaderMap, uri: Uri, body: Body) -> Response {
    match write(&envd, &headers, &uri, body).await {
        Ok(written) => answer::json(StatusCode::OK, &written),
        Err(refusal) => refusal.into_response(),
    }
}

async fn write(envd: &Envd, headers: &HeaderMap, uri: &Uri, body: Body) -> Result<Vec<Written>, Refusal> {
    let (query, caller) = target::allowed(envd, headers, uri, Operation::Write)?;
    let notes = write::notes(headers)?;
    let length = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    let how = How { user: caller.user.clone(), notes, length };
    let bytes = encoding::decoded(headers, body)?;
    let content_type = headers.get(CONTENT_TYPE).and_then(|header| header.to_str().ok()).unwrap_or_default();
    let media_type = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if media_type == "application/octet-stream" {
        let path = query.path.ok_or_else(|| bad("path query parameter is required for raw body upload".into()))?;
        Ok(vec![how.write(caller.path(&path)?, bytes).await?])
    } else if media_type.starts_with("multipart/") {
        let boundary = multer::parse_boundary(content_type)
            .map_err(|error| bad(format!("error parsing multipart form: {error}")))?;
        form(&how, &query, &caller, multer::Multipart::new(bytes, boundary)).await
    } else {
        let expected = "expected multipart/form-data or application/octet-stream";
        Err(bad(format!("unsupported content type: {content_type}, {expected}")))
    }
}

/// Every field `file` of a form: at the query's path, or at the one that is its file's name.
async fn form(
    how: &How,
    query: &Query,
    caller: &Caller,
    mut form: multer::Multipart<'static>,
) -> Result<Vec<Written>, Refusal> {
    let broken = |error: multer::Error| bad(format!("error reading form: {error}"));
    let mut written: Vec<Written> = Vec::new();
    while let Some(field) = form.next_field().await.map_err(broken)? {
        if field.name() != Some("file") {
            continue;
        }
        let path = match query.path.as_deref().or(field.file_name()) {
            Some(path) if !path.is_empty() => caller.path(path)?,
            _ => return Err(bad("a file of the form has no path: give it a filename".into())),
        };
        if written.iter().any(|other| other.path == path) {
            let message = "you cannot upload multiple files to the same path";
            let first = "in one upload request, only the first specified file was uploaded";
            return Err(bad(format!("{message} '{}' {first}", path.display())));
        }
        written.push(how.write(path, field).await?);
    }
    Ok(written)
}
