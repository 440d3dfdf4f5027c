//! What is said of a file's content: its type and name.

use std::path::Path;

use http::HeaderValue;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

/// By the ending of its name, else by its first bytes.
pub(super) fn media_type(path: &Path, first: &[u8]) -> &'static str {
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default().to_ascii_lowercase();
    match ending.as_str() {
        "avif" => "image/avif",
        "css" => "text/css; charset=utf-8",
        "gif" => "image/gif",
        "htm" | "html" => "text/html; charset=utf-8",
        "jpeg" | "jpg" => "image/jpeg",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "json" => "application/json",
        "pdf" => "application/pdf",
        "png" => "image/png",
        "svg" => "image/svg+xml",
        "wasm" => "application/wasm",
        "webp" => "image/webp",
        "xml" => "text/xml; charset=utf-8",
        _ => sniff(first.get(..512).unwrap_or(first)),
    }
}

fn sniff(first: &[u8]) -> &'static str {
    for (start, media_type) in [
        (&b"\x89PNG\r\n\x1a\n"[..], "image/png"),
        (b"\xff\xd8\xff", "image/jpeg"),
        (b"GIF8", "image/gif"),
        (b"%PDF-", "application/pdf"),
        (b"\x1f\x8b\x08", "application/x-gzip"),
        (b"PK\x03\x04", "application/zip"),
    ] {
        if first.starts_with(start) {
            return media_type;
        }
    }
    // A letter that is cut in two at the end is text too.
    let is_text = match str::from_utf8(first) {
        Ok(_) => true,
        Err(error) => error.error_len().is_none(),
    };
    let is_binary = |byte: &u8| matches!(byte, 0..=8 | 11 | 14..=26 | 28..=31);
    if is_text && !first.iter().any(is_binary) { "text/plain; charset=utf-8" } else { "application/octet-stream" }
}

/// `inline`, with the file's name.
pub(super) fn disposition(path: &Path) -> HeaderValue {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "!#$&+-.^_`|~".contains(character);
    let text = if !name.is_empty() && name.chars().all(is_plain) {
        format!("inline; filename={name}")
    } else if name.chars().all(|character| matches!(character, ' '..='~')) {
        format!("inline; filename=\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\""))
    } else {
        format!("inline; filename*=utf-8''{}", utf8_percent_encode(&name, NON_ALPHANUMERIC))
    };
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("inline"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_told_by_name_or_content() {
        for (name, content, wanted) in [
            ("a.json", &b"{}"[..], "application/json"),
            ("a.HTML", b"", "text/html; charset=utf-8"),
            ("a", b"hello\n", "text/plain; charset=utf-8"),
            ("a.txt", b"", "text/plain; charset=utf-8"),
            ("a", b"caf\xc3", "text/plain; charset=utf-8"),
            ("a", b"\xff\xfe", "application/octet-stream"),
            ("a", b"a\0b", "application/octet-stream"),
            ("a", b"\x89PNG\r\n\x1a\n\0", "image/png"),
        ] {
            assert_eq!(media_type(Path::new(name), content), wanted, "{name} {content:?}");
        }
    }

    #[test]
    fn names_are_quoted_where_they_must_be() {
        for (name, wanted) in [
            ("/a/hello.txt", "inline; filename=hello.txt"),
            ("/a/a b\".txt", "inline; filename=\"a b\\\".txt\""),
            ("/a/é\n", "inline; filename*=utf-8''%C3%A9%0A"),
        ] {
            assert_eq!(disposition(Path::new(name)), wanted);
        }
    }
}
