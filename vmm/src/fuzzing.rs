//! What the fuzz targets of `vmm/fuzz` call: all that reads bytes from a guest, from a snapshot or from the node.
//!
//! Each takes any bytes and must come back: an error is an answer, a panic is a find.

mod device;

use stasis_vmm_api::Request;

pub use device::device;

use crate::snapshot::VmState;

/// A state file's content.
pub fn state(bytes: &[u8]) {
    let _ = VmState::decode(bytes);
    // Behind the head, which a fuzzer would have to guess.
    let _ = VmState::decode(&[&VmState::head(), bytes].concat());
}

/// A packet of the control socket.
pub fn request(bytes: &[u8]) {
    if let Ok(request) = serde_json::from_slice::<Request>(bytes) {
        // What was read is what would be written.
        let written = serde_json::to_vec(&request).unwrap_or_default();
        assert_eq!(serde_json::from_slice::<Request>(&written).ok(), Some(request));
    }
}
