//! Processes.
//!
//! ```text
//!  Start ─▶ child (own session) ─▶ running ─exit─▶ what is left in its pipes ─▶ ended, kept 30 s ─▶ forgotten
//!                                    │ output
//!                                    ▼
//!                                   hub ─▶ a queue for each subscriber (Start, Connect) ─▶ frames
//! ```
//! A process belongs to the daemon, not to the call that started it: it goes on when its client leaves, and a deadline of a call ends that
//! call's stream alone. What it writes goes to those who are subscribed at that moment ([`output`] says what happens when one is slow); to
//! nobody, it is read and dropped, so that the process never waits. Its end is told after all that it has written; what it leaves running
//! in the background is not waited for, and its output from then on is dropped. Signals go to the whole session that the process leads.

mod calls;
mod child;
mod events;
mod message;
mod output;
mod running;
mod signal;
mod status;
mod table;

pub(crate) use calls::routes;
pub(crate) use table::Processes;
