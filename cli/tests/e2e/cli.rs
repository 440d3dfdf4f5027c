//! The binary, run to its end.

use std::{
    ffi::OsStr,
    process::{Command, Output},
};

use crate::lane;

/// The binary and the API that it speaks to.
#[derive(Debug, Clone)]
pub(crate) struct Stasis {
    url: String,
}

/// How a run ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Stasis {
    pub(crate) fn speaking_to(url: &str) -> Self {
        Self { url: url.to_owned() }
    }

    pub(crate) fn run<A: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = A>) -> Finished {
        finish(Command::new(lane::binary()).env("STASIS_API", &self.url).args(arguments))
    }
}

/// Runs any command to its end.
pub(crate) fn finish(command: &mut Command) -> Finished {
    let Output { status, stdout, stderr } =
        command.output().unwrap_or_else(|error| panic!("{command:?} cannot be run: {error}"));
    Finished {
        code: status.code().unwrap_or(-1),
        stdout: String::from_utf8_lossy(&stdout).into_owned(),
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
    }
}

impl Finished {
    /// It failed, and said why in one line, which is returned.
    pub(crate) fn refusal(&self) -> &str {
        assert_ne!(self.code, 0, "it should have been refused: {self:?}");
        let lines: Vec<_> = self.stderr.lines().collect();
        assert_eq!(lines.len(), 1, "one line should say why: {self:?}");
        assert_eq!(self.stdout, "", "nothing should be on stdout: {self:?}");
        lines[0]
    }
}
