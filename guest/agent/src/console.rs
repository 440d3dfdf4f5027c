//! What the agent has to tell: short lines on the guest's console.

use std::{
    error::Error,
    fmt::{Arguments, Write as _},
    fs::{File, OpenOptions},
    io::Write as _,
    os::unix::fs::OpenOptionsExt,
    sync::OnceLock,
};

/// The console is a serial port, often a slow one: no message is longer than this.
const LONGEST: usize = 6 * 1024;

/// Writes one message to `/dev/console`, or to standard error where there is none.
pub fn say(message: Arguments<'_>) {
    static CONSOLE: OnceLock<Option<File>> = OnceLock::new();
    let console =
        CONSOLE.get_or_init(|| OpenOptions::new().write(true).custom_flags(libc::O_NOCTTY).open("/dev/console").ok());
    let mut line = format!("stasis-agent: {message}");
    line.truncate(line.floor_char_boundary(LONGEST));
    line.push('\n');
    // Nothing is left to tell if this fails.
    let _ = match console {
        Some(console) => (&*console).write_all(line.as_bytes()),
        None => std::io::stderr().write_all(line.as_bytes()),
    };
}

/// An error and its sources in one line.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        // Writing to a string does not fail.
        let _ = write!(line, ": {error}");
        source = error.source();
    }
    line.replace(['\n', '\r'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn a_chain_is_one_line() {
        assert_eq!(chain(&Outer(std::io::Error::other("inner\nsecond"))), "outer: inner second");
    }
}
