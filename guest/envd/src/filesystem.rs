//! Files as things: what they are, where they are, what becomes of them.
//!
//! ```text
//!  Stat, ListDir, MakeDir, Move, Remove ─▶ a blocking thread ─▶ entries
//!  WatchDir ─▶ a watch ─▶ frames              CreateWatcher ─▶ a watch in the table ─▶ GetWatcherEvents ─▶ RemoveWatcher
//! ```

mod calls;
mod entry;
mod message;
mod operations;
mod polled;
mod watch;
mod watching;

pub(crate) use calls::routes;
pub(crate) use polled::Watchers;
