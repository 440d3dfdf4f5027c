//! Messages of `process.Process`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::connect::{RpcError, value};

/// What to run.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Config {
    #[serde(deserialize_with = "value::default")]
    pub(super) cmd: String,
    #[serde(deserialize_with = "value::default")]
    pub(super) args: Vec<String>,
    #[serde(deserialize_with = "value::default")]
    pub(super) envs: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cwd: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(super) struct Size {
    #[serde(deserialize_with = "value::number")]
    cols: Option<u32>,
    #[serde(deserialize_with = "value::number")]
    rows: Option<u32>,
}

impl Size {
    /// Columns and rows; what no terminal can have is refused.
    pub(super) fn checked(self) -> Result<(u16, u16), RpcError> {
        let side = |asked: Option<u32>| {
            u16::try_from(asked.unwrap_or_default())
                .map_err(|_| RpcError::invalid("a terminal has at most 65535 columns and rows"))
        };
        Ok((side(self.cols)?, side(self.rows)?))
    }
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pty {
    #[serde(deserialize_with = "value::default")]
    pub(super) size: Size,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Start {
    #[serde(deserialize_with = "value::default")]
    pub(super) process: Config,
    pub(super) pty: Option<Pty>,
    pub(super) tag: Option<String>,
    /// Absent from old clients, which expect an input.
    pub(super) stdin: Option<bool>,
}

/// Which process.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Selector {
    #[serde(deserialize_with = "value::number")]
    pub(super) pid: Option<u32>,
    pub(super) tag: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Select {
    #[serde(deserialize_with = "value::default")]
    pub(super) process: Selector,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Update {
    #[serde(deserialize_with = "value::default")]
    pub(super) process: Selector,
    pub(super) pty: Option<Pty>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Input {
    #[serde(deserialize_with = "value::bytes")]
    pub(super) stdin: Option<Vec<u8>>,
    #[serde(deserialize_with = "value::bytes")]
    pub(super) pty: Option<Vec<u8>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SendInput {
    #[serde(deserialize_with = "value::default")]
    pub(super) process: Selector,
    #[serde(deserialize_with = "value::default")]
    pub(super) input: Input,
}

/// One of the three.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamInput {
    pub(super) start: Option<Select>,
    pub(super) data: Option<StreamData>,
    pub(super) keepalive: Option<Empty>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamData {
    #[serde(deserialize_with = "value::default")]
    pub(super) input: Input,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SendSignal {
    #[serde(deserialize_with = "value::default")]
    pub(super) process: Selector,
    pub(super) signal: Option<SignalName>,
}

/// A signal's name or number in the enumeration.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a signal's name")]
pub(super) enum SignalName {
    Name(String),
    Number(i64),
}

#[derive(Debug, Default, Deserialize, Serialize)]
pub(super) struct Empty {}

#[derive(Debug, Serialize)]
pub(super) struct Listed {
    pub(super) config: Config,
    pub(super) pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tag: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Processes {
    pub(super) processes: Vec<Listed>,
}

/// A message of Start's and Connect's streams.
#[derive(Debug, Serialize)]
pub(super) struct Said<'a> {
    pub(super) event: Event<'a>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Event<'a> {
    Start { pid: u32 },
    Data(Data),
    End(&'a End),
    Keepalive {},
}

/// Output, as base64.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Data {
    Stdout(String),
    Stderr(String),
    Pty(String),
}

/// How a process ended. What is zero or false is left out, as protobuf does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct End {
    #[serde(skip_serializing_if = "is_zero")]
    pub(super) exit_code: i32,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) exited: bool,
    pub(super) status: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(number: &i32) -> bool {
    *number == 0
}
