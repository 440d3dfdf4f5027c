//! The report: a file with a JSON list of rows, to which several measurements add.

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
};

use crate::Row;

/// Why a report was not read or written. The file is as it was before.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// It is there, but cannot be read.
    #[error("the report {} cannot be read", path.display())]
    Read {
        /// The report.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Something else stands there.
    #[error("{} holds no report, and is left alone: move it away, or choose another file", path.display())]
    NotAReport {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// Its folder does not exist.
    #[error("there is no folder {} for the report: create it with `mkdir -p`", folder.display())]
    NoFolder {
        /// The folder.
        folder: PathBuf,
    },
    /// It cannot be written.
    #[error("the report {} cannot be written", path.display())]
    Write {
        /// The report.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The rows of a report; none, where there is no file yet.
///
/// # Errors
/// Where there can be no report, or something else stands there.
pub fn load(path: &Path) -> Result<Vec<Row>, ReportError> {
    if let Some(folder) = path.parent().filter(|folder| *folder != Path::new("") && !folder.is_dir()) {
        return Err(ReportError::NoFolder { folder: folder.to_owned() });
    }
    let json = match fs::read(path) {
        Ok(json) => json,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(ReportError::Read { path: path.to_owned(), source }),
    };
    serde_json::from_slice(&json).map_err(|source| ReportError::NotAReport { path: path.to_owned(), source })
}

/// Adds rows to a report, at once or not at all: rows of the same names are replaced where they stand, all others stay.
///
/// # Errors
/// Where the report cannot be read or written.
pub fn merge_into(path: &Path, rows: &[Row]) -> Result<(), ReportError> {
    let mut all = load(path)?;
    for row in rows {
        match all.iter_mut().find(|old| old.name == row.name) {
            Some(old) => old.clone_from(row),
            None => all.push(row.clone()),
        }
    }
    write(path, &all).map_err(|source| ReportError::Write { path: path.to_owned(), source })
}

/// A new file takes the old one's place: who reads sees one of the two, also after a power failure.
fn write(path: &Path, rows: &[Row]) -> io::Result<()> {
    let mut json = serde_json::to_vec_pretty(rows)?;
    json.push(b'\n');
    let beside = beside(path);
    let written = File::create(&beside)
        .and_then(|mut file| file.write_all(&json).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&beside, path));
    if written.is_err() {
        // What is left of it is of no use; why there is none is told.
        let _ = fs::remove_file(&beside);
    }
    written
}

/// In the same folder, for a rename goes no further, and another one for each process.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().map_or_else(OsString::new, ToOwned::to_owned);
    name.push(format!(".{}.new", std::process::id()));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, p50: f64) -> Row {
        Row { name: name.into(), unit: "ms".into(), n: 1, p50, p95: p50, p99: p50, note: String::new() }
    }

    fn names_in(folder: &Path) -> Vec<String> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn others_stay_and_namesakes_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        assert_eq!(load(&path).unwrap(), []);
        merge_into(&path, &[row("a", 1.0), row("b", 2.0)]).unwrap();
        merge_into(&path, &[row("c", 4.0), row("a", 3.0)]).unwrap();
        assert_eq!(load(&path).unwrap(), [row("a", 3.0), row("b", 2.0), row("c", 4.0)]);
        assert_eq!(names_in(folder.path()), ["report.json"], "nothing else is left behind");
    }

    #[test]
    fn a_reader_keeps_the_old_file_whole() {
        use std::io::Read as _;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        merge_into(&path, &[row("a", 1.0)]).unwrap();
        let mut reader = File::open(&path).unwrap();
        merge_into(&path, &[row("a", 2.0), row("b", 2.0)]).unwrap();
        let mut json = String::new();
        reader.read_to_string(&mut json).unwrap();
        assert_eq!(serde_json::from_str::<Vec<Row>>(&json).unwrap(), [row("a", 1.0)]);
    }

    #[test]
    fn a_foreign_file_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        for foreign in ["", "{}", "[{\"name\": \"a\"}]", "text"] {
            fs::write(&path, foreign).unwrap();
            assert!(matches!(merge_into(&path, &[row("a", 1.0)]), Err(ReportError::NotAReport { .. })), "{foreign}");
            assert_eq!(fs::read_to_string(&path).unwrap(), foreign);
        }
    }

    #[test]
    fn a_failed_write_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("report.json");
        fs::create_dir(&path).unwrap();
        assert!(write(&path, &[row("a", 1.0)]).is_err(), "a folder cannot be replaced");
        assert_eq!(names_in(folder.path()), ["report.json"]);
        let nowhere = folder.path().join("none/report.json");
        assert!(matches!(merge_into(&nowhere, &[]), Err(ReportError::NoFolder { .. })));
    }
}
