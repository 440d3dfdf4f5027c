//! Parts of a file: `Range: bytes=…`.

use std::ops::Range;

/// What is to be sent of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    Whole,
    Bytes(Range<u64>),
    /// There is nothing there.
    Beyond,
}

/// What a header asks of so many bytes. What is not one range of bytes is passed over, as the standard allows: then all is sent.
pub(super) fn parse(header: &str, size: u64) -> Part {
    let Some((first, last)) = header.trim().strip_prefix("bytes=").and_then(|range| range.split_once('-')) else {
        return Part::Whole;
    };
    let number = |text: &str| text.trim().parse::<u64>();
    let range = match (first.trim().is_empty(), last.trim().is_empty()) {
        (true, true) => return Part::Whole,
        (true, false) => match number(last) {
            Ok(last) => size.saturating_sub(last)..size,
            Err(_) => return Part::Whole,
        },
        (false, true) => match number(first) {
            Ok(first) => first..size,
            Err(_) => return Part::Whole,
        },
        (false, false) => match (number(first), number(last)) {
            (Ok(first), Ok(last)) if first <= last => first..last.saturating_add(1).min(size),
            _ => return Part::Whole,
        },
    };
    if range.start >= range.end { Part::Beyond } else { Part::Bytes(range) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_by_the_standard() {
        for (header, wanted) in [
            ("bytes=0-0", Part::Bytes(0..1)),
            ("bytes=2-", Part::Bytes(2..10)),
            ("bytes=2-5", Part::Bytes(2..6)),
            ("bytes=2-18446744073709551615", Part::Bytes(2..10)),
            ("bytes=-3", Part::Bytes(7..10)),
            ("bytes=-30", Part::Bytes(0..10)),
            ("bytes=10-", Part::Beyond),
            ("bytes=-0", Part::Beyond),
            ("bytes=5-2", Part::Whole),
            ("bytes=0-1,3-4", Part::Whole),
            ("bytes=-", Part::Whole),
            ("bytes=a-b", Part::Whole),
            ("lines=1-2", Part::Whole),
            ("", Part::Whole),
        ] {
            assert_eq!(parse(header, 10), wanted, "{header}");
        }
        assert_eq!(parse("bytes=0-", 0), Part::Beyond);
    }
}
