//! Bytes at rest: clones, images, digests, published snapshots, and the reflink volume that they live on.
//!
//! Knows no HTTP, no VM id and no runtime: every function blocks. What is promised as a clone is never a copy, and what fails
//! verification is never handed out.

#![forbid(unsafe_code)]

pub mod clone;
pub mod digest;
pub mod frames;
pub mod image;
pub mod snapshot;
mod sparse;
mod tool;
pub mod volume;
mod walk;

pub use clone::{CloneError, clone_file, clone_nameless, grow, import, nameless, reset_clone, supports_reflink};
pub use digest::{Digest, DigestError, Digester, digest_file, digest_folder};
pub use frames::{FRAME, Frames, FramesError, FramesReport, write_frames};
pub use image::{ImageError, grow_ext4, make_ext4};
pub use snapshot::{Manifest, Part, PublishError, Snapshot, SnapshotError, Staging, sweep};
pub use tool::ToolError;
pub use volume::{Volume, VolumeError, VolumeOptions};
pub use walk::WalkError;
