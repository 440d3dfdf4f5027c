//! What is told of a file.

use std::{
    collections::BTreeMap,
    fs::{self, FileType, Metadata},
    io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
    time::{Duration, SystemTime},
};

use serde::Serialize;

use crate::{metadata, users::Users};

/// The first second of the year 10000, which RFC 3339 cannot write.
const YEAR_10000: Duration = Duration::from_secs(253_402_300_800);

/// `EntryInfo`. A link is told with the type and mode of what it leads to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Entry {
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    path: String,
    /// Bytes, as text: protobuf's JSON has no integers of 64 bits.
    size: String,
    mode: u32,
    permissions: String,
    owner: String,
    group: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    modified_time: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    symlink_target: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    is_symlink: bool,
}

impl Entry {
    /// As it is now.
    pub(super) fn read(path: &Path, users: &Users) -> io::Result<Self> {
        let own = fs::symlink_metadata(path)?;
        let target = own.is_symlink().then(|| fs::canonicalize(path).unwrap_or_else(|_| path.into()));
        let meant = match &target {
            Some(target) => fs::metadata(target).ok(),
            None => Some(own.clone()),
        };
        Ok(Self {
            name: path.file_name().map_or_else(|| "/".into(), |name| name.to_string_lossy().into_owned()),
            kind: meant.as_ref().map_or(UNSPECIFIED, |meant| kind(meant.file_type())),
            path: path.to_string_lossy().into_owned(),
            size: own.len().to_string(),
            mode: meant.map_or(0, |meant| meant.mode() & 0o777),
            permissions: permissions(&own),
            owner: users.user_name(own.uid()),
            group: users.group_name(own.gid()),
            modified_time: own.modified().ok().and_then(time),
            symlink_target: target.map(|target| target.to_string_lossy().into_owned()),
            metadata: metadata::read(path),
            is_symlink: own.is_symlink(),
        })
    }
}

const UNSPECIFIED: &str = "FILE_TYPE_UNSPECIFIED";

fn kind(file: FileType) -> &'static str {
    if file.is_file() {
        "FILE_TYPE_FILE"
    } else if file.is_dir() {
        "FILE_TYPE_DIRECTORY"
    } else {
        UNSPECIFIED
    }
}

/// As Go writes a mode: letters of the kind and of the special bits, then nine of who may what.
fn permissions(metadata: &Metadata) -> String {
    let (file, mode) = (metadata.file_type(), metadata.mode());
    let mut text = String::new();
    for (is, letters) in [
        (file.is_dir(), "d"),
        (file.is_symlink(), "L"),
        (file.is_block_device(), "D"),
        (file.is_fifo(), "p"),
        (file.is_socket(), "S"),
        (mode & 0o4000 != 0, "u"),
        (mode & 0o2000 != 0, "g"),
        (file.is_char_device(), "Dc"),
        (mode & 0o1000 != 0, "t"),
    ] {
        if is {
            text.push_str(letters);
        }
    }
    if text.is_empty() {
        text.push('-');
    }
    for (bit, letter) in (0..9).rev().zip("rwxrwxrwx".chars()) {
        text.push(if mode & (1 << bit) == 0 { '-' } else { letter });
    }
    text
}

/// RFC 3339; none outside the years that it can write and 1970 begins.
fn time(time: SystemTime) -> Option<String> {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    (since < YEAR_10000).then(|| humantime::format_rfc3339_nanos(time).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_that_cannot_be_written_are_left_out() {
        let epoch = SystemTime::UNIX_EPOCH;
        assert_eq!(time(epoch + Duration::new(1_700_000_000, 5)).unwrap(), "2023-11-14T22:13:20.000000005Z");
        assert_eq!(time(epoch - Duration::from_secs(1)), None);
        assert_eq!(time(epoch + YEAR_10000), None);
        assert!(time(epoch + YEAR_10000 - Duration::from_secs(1)).is_some());
    }

    #[test]
    fn modes_are_written_as_go_writes_them() {
        let folder = tempfile::tempdir().unwrap();
        for (mode, wanted) in
            [(0o644, "-rw-r--r--"), (0o4755, "urwxr-xr-x"), (0o2700, "grwx------"), (0o000, "----------")]
        {
            let path = folder.path().join(format!("{mode}"));
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
            assert_eq!(permissions(&fs::metadata(&path).unwrap()), wanted);
        }
        assert_eq!(permissions(&fs::metadata("/tmp").unwrap()), "dtrwxrwxrwx");
        assert_eq!(permissions(&fs::metadata("/dev/null").unwrap()), "Dcrw-rw-rw-");
    }
}
