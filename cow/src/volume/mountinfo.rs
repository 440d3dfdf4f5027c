//! `/proc/self/mountinfo`, as far as it is needed here.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

/// One mount.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mount {
    /// Device of its file system, `major:minor`.
    pub(super) device: String,
    /// Where it is mounted.
    pub(super) point: PathBuf,
    /// The kind of file system.
    pub(super) kind: String,
    /// What is mounted, as the mounter called it.
    pub(super) source: String,
}

/// All mounts that this process sees.
pub(super) fn mounts() -> io::Result<Vec<Mount>> {
    let table = fs::read("/proc/self/mountinfo")?;
    Ok(table.split(|byte| *byte == b'\n').filter_map(parse).collect())
}

/// The mount that shows at `point`: the last one made there.
pub(super) fn topmost<'a>(mounts: &'a [Mount], point: &Path) -> Option<&'a Mount> {
    mounts.iter().rfind(|mount| mount.point == point)
}

/// `36 35 98:0 /root /point options [optional…] - kind source options`.
fn parse(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let device = text(fields.nth(2)?);
    let point = PathBuf::from(OsString::from_vec(unescape(fields.nth(1)?)));
    fields.find(|field| *field == b"-")?;
    Some(Mount { device, point, kind: text(fields.next()?), source: text(&unescape(fields.next()?)) })
}

fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(field).into_owned()
}

/// Space, tab, newline and backslash are written as a backslash and three octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        match after.split_at_checked(3).and_then(|(digits, after)| Some((octal(digits)?, after))) {
            Some((byte, after)) if *first == b'\\' => {
                bytes.push(byte);
                rest = after;
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    bytes
}

fn octal(digits: &[u8]) -> Option<u8> {
    digits.iter().try_fold(0u8, |value, digit| match digit {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(digit - b'0'),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_optional_fields_and_escapes() {
        let line = br"36 35 7:3 / /mnt/a\040b\134c rw,noatime shared:1 master:2 - xfs /dev/loop3 rw";
        let mount = parse(line).unwrap();
        assert_eq!(mount.device, "7:3");
        assert_eq!(mount.point, Path::new(r"/mnt/a b\c"));
        assert_eq!((mount.kind.as_str(), mount.source.as_str()), ("xfs", "/dev/loop3"));
        assert_eq!(parse(b""), None);
        assert_eq!(unescape(br"\04 \8"), br"\04 \8");
    }

    #[test]
    fn the_last_mount_shows() {
        let lines =
            [&b"1 0 8:1 / /x rw - ext4 a rw"[..], b"2 1 8:2 / /x rw - xfs b rw", b"3 1 8:3 / /xy rw - xfs c rw"];
        let mounts: Vec<Mount> = lines.iter().filter_map(|line| parse(line)).collect();
        assert_eq!(topmost(&mounts, Path::new("/x")).unwrap().source, "b");
        assert!(topmost(&mounts, Path::new("/y")).is_none());
    }

    #[test]
    fn this_host_has_a_root() {
        assert!(topmost(&mounts().unwrap(), Path::new("/")).is_some());
    }
}
