//! Messages between the node, a pager and the VMM processes whose memory it fills.
//!
//! ```text
//!  node ──PagerRequest, FromPager──▶ pager ◀──Handover and a userfaultfd── VMM process
//!    └──────────── the two ends of the pager's and the VMM's socket ──────────┘
//! ```
//!
//! A pager holds one template's memory image. Its control socket is the same as a VMM process's ([`crate::CONTROL_FD`]), and so are its
//! packets.

use serde::{Deserialize, Serialize};

/// What the node asks of a pager.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum PagerRequest {
    /// Take an image over: first of all, and once. Descriptors: the image, only to be read; an empty memfd of the memory's size, which the
    /// pager fills and VMs map privately; the file of the working set, to be read and written, which may be empty.
    Open {
        /// What the image's file is.
        format: ImageFormat,
    },
    /// A VM is about to be restored. Descriptor: the pager's end of a `SOCK_SEQPACKET` pair; the VMM process gets the other with
    /// [`crate::Request::Restore`], and hands its userfaultfd over there ([`Handover`]).
    Attach {
        /// Names it from now on.
        vm: u64,
    },
    /// The VM has given its first answer: what it has touched is its working set. Answered with [`PagerReply::Settled`].
    Settled {
        /// Which.
        vm: u64,
    },
}

/// What the file of a memory image is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageFormat {
    /// The memory itself, a page at its address.
    Raw,
    /// Compressed frames (`cow/src/frames.rs`).
    Frames,
}

/// What a pager says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromPager {
    /// The answer to the oldest unanswered request.
    Reply(PagerReply),
    /// A VM's memory can no longer be filled; its process is made to end.
    Lost {
        /// Which.
        vm: u64,
        /// Why.
        reason: String,
    },
}

/// Answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum PagerReply {
    /// Done.
    Done,
    /// What a VM took until its first answer.
    Settled(PagerReport),
    /// The request failed.
    Failed {
        /// What failed.
        reason: String,
    },
}

/// What a VM took until its first answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagerReport {
    /// Faults that the guest had to wait for.
    pub faults: u64,
    /// Frames that were put in ahead of its faults.
    pub ahead: u32,
    /// Whether there was a working set to put in ahead.
    pub helped: bool,
    /// Bytes of the image's file that this pager has read so far, for all its VMs.
    pub bytes_read: u64,
}

/// What a VMM process says to its pager, once. Descriptor: a userfaultfd of its memory, registered and not blocking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handover {
    /// Where the memory begins in the process.
    pub address: u64,
    /// Its length, that of the image's memory.
    pub bytes: u64,
}
