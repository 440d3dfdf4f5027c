//! Messages of `filesystem.Filesystem`.

use serde::{Deserialize, Serialize};

use crate::{connect::value, filesystem::entry::Entry};

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct At {
    #[serde(deserialize_with = "value::default")]
    pub(super) path: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ListDir {
    #[serde(deserialize_with = "value::default")]
    pub(super) path: String,
    #[serde(deserialize_with = "value::number")]
    pub(super) depth: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Move {
    #[serde(deserialize_with = "value::default")]
    pub(super) source: String,
    #[serde(deserialize_with = "value::default")]
    pub(super) destination: String,
}

/// Of WatchDir and CreateWatcher.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Watch {
    #[serde(deserialize_with = "value::default")]
    pub(super) path: String,
    #[serde(deserialize_with = "value::default")]
    pub(super) recursive: bool,
    #[serde(deserialize_with = "value::default", alias = "include_entry")]
    pub(super) include_entry: bool,
    #[serde(deserialize_with = "value::default", alias = "allow_network_mounts")]
    pub(super) allow_network_mounts: bool,
}

#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct WatcherId {
    #[serde(deserialize_with = "value::default", alias = "watcher_id")]
    pub(super) watcher_id: String,
}

#[derive(Debug, Serialize)]
pub(super) struct Found {
    pub(super) entry: Entry,
}

#[derive(Debug, Serialize)]
pub(super) struct Listed {
    pub(super) entries: Vec<Entry>,
}

#[derive(Debug, Serialize)]
pub(super) struct Empty {}

#[derive(Debug, Serialize)]
pub(super) struct Events {
    pub(super) events: Vec<Event>,
}

/// What happened to a file of a watched folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Event {
    /// Relative to the folder.
    pub(super) name: String,
    #[serde(rename = "type")]
    pub(super) kind: Kind,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) entry: Option<Entry>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum Kind {
    #[serde(rename = "EVENT_TYPE_CREATE")]
    Create,
    #[serde(rename = "EVENT_TYPE_WRITE")]
    Write,
    #[serde(rename = "EVENT_TYPE_REMOVE")]
    Remove,
    #[serde(rename = "EVENT_TYPE_RENAME")]
    Rename,
    #[serde(rename = "EVENT_TYPE_CHMOD")]
    Chmod,
}

/// A message of WatchDir's stream.
#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Said {
    Start {},
    Filesystem(Box<Event>),
    Keepalive {},
}
