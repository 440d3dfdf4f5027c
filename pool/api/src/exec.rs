//! Commands beside a sandbox's function, and what that has printed.

use std::collections::BTreeMap;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

/// Most bytes of a command's standard input.
pub const MOST_INPUT: usize = 256 << 10;

/// A command to run in a sandbox, as its function's user.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Command {
    /// The program, looked for in `PATH`, and its arguments.
    pub command: Vec<String>,
    /// Variables beside the function's.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Where; the function's directory (`/app`) if not given.
    #[serde(default)]
    pub directory: Option<String>,
    /// What it reads from its standard input, which then ends.
    #[serde(default)]
    pub stdin: String,
}

impl Command {
    /// Why nobody could run it.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        let empty = self.command.first().is_none_or(String::is_empty);
        let long = self.stdin.len() > MOST_INPUT;
        let text = self.command.iter().chain(self.env.iter().flat_map(|(name, value)| [name, value]));
        let nul = text.chain(&self.directory).any(|text| text.contains('\0'));
        let name = self.env.keys().find(|name| name.is_empty() || name.contains('='));
        match name {
            _ if empty => Some("command: must name a program, such as [\"ls\", \"-l\"]".into()),
            _ if long => Some(format!("stdin: at most {MOST_INPUT} bytes; write it to a file in the sandbox instead")),
            _ if nul => Some("command, env and directory: must not contain a NUL character".into()),
            Some(name) => Some(format!("env: {name:?} is no name of a variable")),
            None => None,
        }
    }
}

/// What a command does. The last one is one of `Exited`, `Killed` and `Lost`. Dropping the receiver kills it.
pub type CommandEvents = mpsc::Receiver<CommandEvent>;

/// Something that a command does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum CommandEvent {
    /// It wrote to its standard output.
    Stdout(Written),
    /// It wrote to its standard error.
    Stderr(Written),
    /// It ended with this status.
    Exited {
        /// 0 for success.
        status: i32,
    },
    /// It was ended by a signal.
    Killed {
        /// Its number.
        signal: i32,
    },
    /// Nothing more is known of it: its sandbox was paused or killed, or has ended.
    Lost {
        /// Why.
        reason: String,
    },
}

/// Bytes: as `text` where they are UTF-8, else as `base64`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Form", into = "Form")]
pub struct Written(pub Bytes);

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Form {
    Text(String),
    Base64(String),
}

impl From<Written> for Form {
    fn from(written: Written) -> Self {
        match std::str::from_utf8(&written.0) {
            Ok(text) => Self::Text(text.to_owned()),
            Err(_) => Self::Base64(BASE64_STANDARD.encode(&written.0)),
        }
    }
}

impl TryFrom<Form> for Written {
    type Error = base64::DecodeError;

    fn try_from(form: Form) -> Result<Self, base64::DecodeError> {
        match form {
            Form::Text(text) => Ok(Self(text.into())),
            Form::Base64(text) => BASE64_STANDARD.decode(text).map(|bytes| Self(bytes.into())),
        }
    }
}

/// What is known of a sandbox's words. It is not resumed for them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxLogs {
    /// The last 64 KiB that its function printed; none unless it runs.
    pub output: Option<String>,
    /// The last 16 KiB of its console; none where it has no process.
    pub console: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_comes_back_to_the_byte() {
        for (bytes, line) in [
            (b"caf\xc3\xa9\n".as_slice(), r#"{"event":"stdout","text":"caf\u00e9\n"}"#),
            (b"\xff\0", r#"{"event":"stdout","base64":"/wA="}"#),
        ] {
            let event = CommandEvent::Stdout(Written(Bytes::copy_from_slice(bytes)));
            let shown: serde_json::Value = serde_json::to_value(&event).unwrap();
            assert_eq!(shown, serde_json::from_str::<serde_json::Value>(line).unwrap());
            assert_eq!(serde_json::from_value::<CommandEvent>(shown).unwrap(), event);
        }
        let event = serde_json::to_string(&CommandEvent::Exited { status: 3 }).unwrap();
        assert_eq!(event, r#"{"event":"exited","status":3}"#);
    }

    #[test]
    fn a_command_that_nobody_could_run_is_refused() {
        let parse = |text: &str| serde_json::from_str::<Command>(text).unwrap().fault();
        assert_eq!(parse(r#"{"command":["ls",""],"env":{"A":"="},"directory":"/"}"#), None);
        for (bad, what) in [
            (r#"{"command":[]}"#, "command"),
            (r#"{"command":[""]}"#, "command"),
            (r#"{"command":["a\u0000"]}"#, "NUL"),
            (r#"{"command":["a"],"env":{"A=B":""}}"#, "A=B"),
        ] {
            assert!(parse(bad).is_some_and(|fault| fault.contains(what)), "{bad}");
        }
        let long = Command { command: vec!["cat".into()], stdin: "x".repeat(MOST_INPUT + 1), ..Command::default() };
        assert!(long.fault().is_some_and(|fault| fault.contains("stdin")));
    }
}
