//! gzip, both ways.

use std::io::{self, Write};

use axum::body::Body;
use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use futures_util::{Stream, StreamExt, TryStreamExt, stream::unfold};
use http::{
    HeaderMap, StatusCode,
    header::{ACCEPT_ENCODING, CONTENT_ENCODING},
};

use crate::answer::Refusal;

/// What is decoded at once: gzip makes at most a thousand times as much of it.
const SLICE: usize = 16 * 1024;

/// How an answer is to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    Identity,
    Gzip,
}

/// What `Accept-Encoding` asks for: gzip where it is the one coding that is named, which is how the SDKs' callers ask for it, or where nothing
/// else may be sent. Every HTTP library's own list names gzip among others; to compress for that would make each transfer several times slower.
pub(super) fn accepted(headers: &HeaderMap) -> Result<Encoding, Refusal> {
    let header = headers.get(ACCEPT_ENCODING).and_then(|header| header.to_str().ok()).unwrap_or_default();
    let codings: Vec<(String, bool)> = header.split(',').filter_map(coding).collect();
    let may = |name: &str| codings.iter().find(|(coding, _)| coding == name).map(|(_, may)| *may);
    let gzip = may("gzip").or(may("*"));
    let identity = may("identity").unwrap_or(may("*") != Some(false));
    let asked = codings.iter().filter(|(coding, may)| *may && coding != "identity" && coding != "*");
    match (gzip, identity) {
        (Some(true), false) => Ok(Encoding::Gzip),
        (_, false) => {
            Err(Refusal::new(StatusCode::NOT_ACCEPTABLE, "no acceptable encoding found, supported: identity, gzip"))
        }
        (Some(true), true) if asked.map(|(coding, _)| coding.as_str()).eq(["gzip"]) => Ok(Encoding::Gzip),
        _ => Ok(Encoding::Identity),
    }
}

/// A coding's name, and whether it may be sent: `gzip;q=0.5`.
fn coding(text: &str) -> Option<(String, bool)> {
    let mut parts = text.split(';').map(str::trim);
    let name = parts.next().filter(|name| !name.is_empty())?.to_ascii_lowercase();
    let quality = parts.find_map(|part| part.strip_prefix("q=").or(part.strip_prefix("Q=")));
    Some((name, quality.is_none_or(|quality| quality.trim().parse::<f32>().is_ok_and(|quality| quality > 0.0))))
}

/// A request's bytes, decoded.
pub(super) fn decoded(
    headers: &HeaderMap,
    body: Body,
) -> Result<futures_util::stream::BoxStream<'static, io::Result<Bytes>>, Refusal> {
    let bytes = body.into_data_stream().map_err(io::Error::other);
    let header = headers.get(CONTENT_ENCODING).map_or("identity", |header| header.to_str().unwrap_or("?"));
    match header.trim().to_ascii_lowercase().as_str() {
        "identity" | "" => Ok(bytes.boxed()),
        "gzip" => Ok(gunzip(bytes.boxed()).boxed()),
        _ => Err(Refusal::new(
            StatusCode::BAD_REQUEST,
            format!("unsupported Content-Encoding: {header}, supported: [gzip]"),
        )),
    }
}

struct Gunzip<S> {
    source: S,
    waiting: Bytes,
    decoder: MultiGzDecoder<Vec<u8>>,
    /// Something came: no bytes at all are not gzip.
    begun: bool,
}

fn gunzip<S>(source: S) -> impl Stream<Item = io::Result<Bytes>>
where
    S: Stream<Item = io::Result<Bytes>> + Unpin,
{
    let gunzip = Gunzip { source, waiting: Bytes::new(), decoder: MultiGzDecoder::new(Vec::new()), begun: false };
    unfold(Some(gunzip), |gunzip| async move {
        let mut gunzip = gunzip?;
        loop {
            if gunzip.waiting.is_empty() {
                match gunzip.source.next().await {
                    Some(Ok(bytes)) => gunzip.waiting = bytes,
                    Some(Err(error)) => return Some((Err(error), None)),
                    None => return gunzip.finish().transpose().map(|bytes| (bytes, None)),
                }
            }
            let slice = gunzip.waiting.split_to(gunzip.waiting.len().min(SLICE));
            gunzip.begun |= !slice.is_empty();
            let mut decoder = gunzip.decoder;
            let done = tokio::task::spawn_blocking(move || {
                let written = decoder.write_all(&slice).and_then(|()| decoder.flush());
                (std::mem::take(decoder.get_mut()), decoder, written)
            });
            let (bytes, decoder, written) = match done.await {
                Ok(done) => done,
                Err(error) => return Some((Err(io::Error::other(error)), None)),
            };
            gunzip.decoder = decoder;
            if let Err(error) = written {
                return Some((Err(error), None));
            }
            if !bytes.is_empty() {
                return Some((Ok(bytes.into()), Some(gunzip)));
            }
        }
    })
}

impl<S> Gunzip<S> {
    /// What is left; an error where the end is missing.
    fn finish(self) -> io::Result<Option<Bytes>> {
        if !self.begun {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "failed to create gzip reader: no data"));
        }
        let rest = self.decoder.finish()?;
        Ok((!rest.is_empty()).then(|| rest.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_sent_to_who_asks_for_it() {
        for (header, wanted) in [
            ("", Some(Encoding::Identity)),
            ("gzip", Some(Encoding::Gzip)),
            ("GZIP;q=0.5", Some(Encoding::Gzip)),
            ("gzip, identity;q=0.5", Some(Encoding::Gzip)),
            ("gzip, deflate", Some(Encoding::Identity)),
            ("gzip, deflate, br, zstd", Some(Encoding::Identity)),
            ("br", Some(Encoding::Identity)),
            ("*", Some(Encoding::Identity)),
            ("gzip;q=0", Some(Encoding::Identity)),
            ("gzip, deflate, identity;q=0", Some(Encoding::Gzip)),
            ("*;q=0, gzip", Some(Encoding::Gzip)),
            ("identity;q=0, *", Some(Encoding::Gzip)),
            ("identity;q=0", None),
            ("br, identity;q=0, gzip;q=0", None),
            ("*;q=0", None),
        ] {
            let headers = HeaderMap::from_iter([(ACCEPT_ENCODING, header.parse().unwrap())]);
            assert_eq!(accepted(&headers).ok(), wanted, "{header:?}");
        }
    }
}
