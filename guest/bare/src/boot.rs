//! The conversation at power-on (the protocol: [`stasis_guest_wire::boot`]).

use alloc::{format, string::String, vec::Vec};
use core::time::Duration;

use stasis_guest_wire::{
    boot::{FromAgent, FromNode},
    frame::{self, FrameError},
};

/// How far it has come.
#[derive(Debug, Default)]
pub struct PowerOn {
    input: Vec<u8>,
    /// The node has said that it may be snapshotted.
    parked: bool,
}

/// The first frame of the connection.
///
/// # Errors
/// Never: the message fits a frame.
pub fn hello(boot_id: &str) -> Result<Vec<u8>, FrameError> {
    frame::encode(&FromAgent::Hello {
        agent_version: env!("CARGO_PKG_VERSION").into(),
        kernel_release: "bare".into(),
        boot_id: boot_id.into(),
    })
}

/// An id of this power-on, from what the host left of entropy in memory.
#[must_use]
pub fn boot_id(seed: [u8; 16]) -> String {
    let hex: String = seed.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

impl PowerOn {
    /// Takes what has come; what is to be sent.
    ///
    /// # Errors
    /// The node does not speak this protocol.
    pub fn received(&mut self, bytes: &[u8]) -> Result<Vec<u8>, FrameError> {
        self.input.extend_from_slice(bytes);
        let mut output = Vec::new();
        while let Some((header, rest)) = self.input.split_first_chunk::<4>() {
            let length = frame::body_length(*header)?;
            let Some(body) = rest.get(..length) else { break };
            let answer = match frame::decode(body)? {
                FromNode::Start(_) => FromAgent::Ready { elapsed: Duration::ZERO, null_requests: Vec::new() },
                FromNode::Park => {
                    self.parked = true;
                    FromAgent::Parked { wake_page: None }
                }
            };
            self.input.drain(..4 + length);
            output.extend(frame::encode(&answer)?);
        }
        Ok(output)
    }

    /// The connection is to be closed: the snapshot comes.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        self.parked
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use stasis_guest_wire::boot::Start;

    use super::*;

    #[test]
    fn it_is_ready_when_started_and_parks_when_told() {
        let mut power_on = PowerOn::default();
        let start = FromNode::Start(Start {
            command: "x".into(),
            port: 8080,
            ready_path: None,
            ready_timeout: Duration::ZERO,
            env: BTreeMap::new(),
            wall_clock_ns: 0,
        });
        let frames = [frame::encode(&start).unwrap(), frame::encode(&FromNode::Park).unwrap()].concat();
        let mut output = Vec::new();
        for byte in frames {
            assert!(!power_on.is_parked());
            output.extend(power_on.received(&[byte]).unwrap());
        }
        assert!(power_on.is_parked());
        let mut rest = output.as_slice();
        assert!(matches!(frame::receive(&mut rest).unwrap(), FromAgent::Ready { .. }));
        assert_eq!(frame::receive::<FromAgent>(&mut rest).unwrap(), FromAgent::Parked { wake_page: None });
        assert!(rest.is_empty());
    }

    #[test]
    fn a_boot_id_has_the_form_of_a_kernel_s() {
        let seed = core::array::from_fn(|at| u8::try_from(at).unwrap());
        assert_eq!(boot_id(seed), "00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
