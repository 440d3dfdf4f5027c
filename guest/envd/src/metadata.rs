//! What callers note about a file: extended attributes `user.e2b.*`.

use std::{collections::BTreeMap, io, path::Path};

use rustix::{
    fs::{XattrFlags, flistxattr, fremovexattr, fsetxattr, getxattr, listxattr},
    io::Errno,
};

const PREFIX: &str = "user.e2b.";
/// The most that the kernel has of a list or a value.
const LARGEST: usize = 64 * 1024;

/// The notes of a file; none where it cannot have any.
pub(crate) fn read(path: &Path) -> BTreeMap<String, String> {
    let mut notes = BTreeMap::new();
    let mut list = vec![0; LARGEST];
    let length = listxattr(path, list.as_mut_slice()).unwrap_or_default();
    let mut value = Vec::new();
    for name in names(list.get(..length).unwrap_or_default()) {
        value.resize(LARGEST, 0);
        if let Ok(length) = getxattr(path, name, value.as_mut_slice()) {
            let text = String::from_utf8_lossy(value.get(..length).unwrap_or_default()).into_owned();
            notes.insert(name.strip_prefix(PREFIX).unwrap_or(name).to_owned(), text);
        }
    }
    notes
}

/// Makes these the notes of an open file, and no others.
pub(crate) fn replace(file: &std::fs::File, notes: &BTreeMap<String, String>) -> io::Result<()> {
    let mut list = vec![0; LARGEST];
    let length = match flistxattr(file, list.as_mut_slice()) {
        Ok(length) => length,
        // Then there are none.
        Err(Errno::NOTSUP) => 0,
        Err(error) => return Err(error.into()),
    };
    for name in names(list.get(..length).unwrap_or_default()) {
        if name.strip_prefix(PREFIX).is_none_or(|key| !notes.contains_key(key)) {
            fremovexattr(file, name)?;
        }
    }
    for (key, value) in notes {
        fsetxattr(file, format!("{PREFIX}{key}"), value.as_bytes(), XattrFlags::empty())?;
    }
    Ok(())
}

/// Ours, of a list of names that each end with a zero.
fn names(list: &[u8]) -> impl Iterator<Item = &str> {
    list.split(|byte| *byte == 0).filter_map(|name| str::from_utf8(name).ok()).filter(|name| name.starts_with(PREFIX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_names_are_notes() {
        assert_eq!(
            names(b"user.e2b.a\0user.b\0security.x\0user.e2b.\xff\0user.e2b.c\0").collect::<Vec<_>>(),
            ["user.e2b.a", "user.e2b.c"]
        );
        assert_eq!(names(b"").count(), 0);
    }
}
