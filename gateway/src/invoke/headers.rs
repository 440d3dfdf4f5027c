//! Headers that belong to one connection and go no further (RFC 9110, 7.6.1).

use http::{HeaderMap, HeaderName, header};

const HOP_BY_HOP: [HeaderName; 6] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("http2-settings"),
];

/// Removes them, and those that `Connection` names. `Trailer` stays: trailers are passed on.
pub(super) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|names| names.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    let proxy: Vec<HeaderName> = headers.keys().filter(|name| name.as_str().starts_with("proxy-")).cloned().collect();
    for name in HOP_BY_HOP.iter().chain(&named).chain(&proxy) {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_connection_names_goes_too() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "x-mine, close"),
            ("connection", "keep-alive"),
            ("x-mine", "1"),
            ("keep-alive", "timeout=5"),
            ("te", "trailers"),
            ("proxy-authorization", "secret"),
            ("proxy-connection", "close"),
            ("upgrade", "h2c"),
            ("transfer-encoding", "chunked"),
            ("trailer", "x-sum"),
            ("x-kept", "2"),
        ] {
            headers.append(name, value.parse().unwrap());
        }
        strip_hop_by_hop(&mut headers);
        let mut left: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["trailer", "x-kept"]);
    }
}
