//! Bytes of files, up and down.
//!
//! ```text
//!  GET   query ─▶ token or signature ─▶ user, path ─▶ open ─▶ first piece ─▶ whole, part of it, or gzip ─▶ pieces, as the client takes them
//!  POST  query ─▶ token or signature ─▶ user ─▶ (gunzip) ─▶ the body, or the files of a form ─▶ pieces, written as they come
//! ```
//! Of a transfer no more than a few pieces of [`PIECE`] bytes are in memory, and while its client is slow no thread waits for it.

mod compose;
mod content;
mod encoding;
mod get;
mod post;
mod range;
mod sign;
mod target;
mod write;

use axum::{
    Router,
    routing::{get as get_of, post as post_of},
};

use crate::envd::Envd;

/// Bytes that are read or written at once.
const PIECE: usize = 256 * 1024;

/// Where they are served.
pub(crate) fn routes() -> Router<Envd> {
    Router::new()
        .route("/files", get_of(get::answer).post(post::answer))
        .route("/files/compose", post_of(compose::answer))
}
