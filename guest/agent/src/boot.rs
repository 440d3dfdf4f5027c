//! The conversation at power-on (the protocol: [`stasis_guest_wire::boot`]).

use std::{
    io::{Read, Write},
    time::Duration,
};

use stasis_guest_wire::{
    boot::{FromAgent, FromNode, Start},
    frame::{self, FrameError},
    page::WakePage,
};

/// Why a power-on ended without a VM that can be snapshotted.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The connection failed, or the node does not speak this protocol.
    #[error("the conversation with the node failed")]
    Frame(#[from] FrameError),
    /// The node said something out of turn.
    #[error("the node said {0} out of turn")]
    Turn(&'static str),
    /// The function did not become ready or the guest could not be parked, and the node knows.
    #[error("no template can be made: {0}")]
    Failed(String),
}

/// A function that answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    /// From its start to its first answer.
    pub elapsed: Duration,
    /// Times of a few requests.
    pub null_requests: Vec<Duration>,
}

/// What no template can be made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// Why, in one line for a person.
    pub reason: String,
    /// What it printed last.
    pub output: String,
}

/// Holds the whole conversation: `start` starts the function and waits until it answers, `park` prepares for the
/// snapshot and gives what lives on, and where that waits. The VM may be snapshotted once the connection is closed.
///
/// # Errors
/// The connection or the function failed; the node has been told what could be told.
pub fn converse<T>(
    node: &mut (impl Read + Write),
    hello: &FromAgent,
    start: impl FnOnce(&Start) -> Result<Ready, Failed>,
    park: impl FnOnce(&Start) -> Result<(T, Option<WakePage>), Failed>,
) -> Result<T, BootError> {
    frame::send(node, hello)?;
    let FromNode::Start(order) = frame::receive(node)? else { return Err(BootError::Turn("park before start")) };
    let Ready { elapsed, null_requests } = start(&order).or_else(|failed| tell(node, failed))?;
    frame::send(node, &FromAgent::Ready { elapsed, null_requests })?;
    let FromNode::Park = frame::receive(node)? else { return Err(BootError::Turn("start twice")) };
    let (parked, wake_page) = park(&order).or_else(|failed| tell(node, failed))?;
    frame::send(node, &FromAgent::Parked { wake_page })?;
    Ok(parked)
}

fn tell<T>(node: &mut impl Write, Failed { reason, output }: Failed) -> Result<T, BootError> {
    frame::send(node, &FromAgent::Failed { reason: reason.clone(), output })?;
    Err(BootError::Failed(reason))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{os::unix::net::UnixStream, thread};

    const PAGE: WakePage = WakePage { address: 4096, token: 1 };

    #[derive(Clone, Copy, PartialEq)]
    enum Fails {
        Nothing,
        Start,
        Park,
    }

    fn start() -> FromNode {
        FromNode::Start(Start {
            command: "true".into(),
            port: 1,
            ready_path: None,
            ready_timeout: Duration::ZERO,
            env: std::collections::BTreeMap::default(),
            wall_clock_ns: 0,
        })
    }

    /// What the agent said to `said`, whether it parked, and how the conversation ended.
    fn held(said: &[FromNode], fails: Fails) -> (Vec<FromAgent>, bool, Result<(), BootError>) {
        let (mut node, mut agent) = UnixStream::pair().unwrap();
        for message in said {
            frame::send(&mut node, message).unwrap();
        }
        node.shutdown(std::net::Shutdown::Write).unwrap();
        let conversation = thread::spawn(move || {
            let ready = || Ready { elapsed: Duration::from_secs(1), null_requests: vec![Duration::ZERO] };
            let failed = || Failed { reason: "no".into(), output: "oops".into() };
            let mut parked = false;
            let start = |_: &Start| if fails == Fails::Start { Err(failed()) } else { Ok(ready()) };
            let result = converse(&mut agent, &FromAgent::Parked { wake_page: None }, start, |_| {
                parked = true;
                if fails == Fails::Park { Err(failed()) } else { Ok(((), Some(PAGE))) }
            });
            (parked, result)
        });
        let heard = std::iter::from_fn(|| frame::receive(&mut node).ok()).skip(1).collect();
        let (parked, result) = conversation.join().unwrap();
        (heard, parked, result)
    }

    #[test]
    fn a_function_that_answers_is_parked() {
        let (heard, parked, result) = held(&[start(), FromNode::Park], Fails::Nothing);
        assert!(matches!(heard.as_slice(), [FromAgent::Ready { .. }, FromAgent::Parked { wake_page: Some(PAGE) }]));
        assert!(parked && result.is_ok());
    }

    #[test]
    fn a_function_that_fails_is_told_with_its_output() {
        let (heard, parked, result) = held(&[start(), FromNode::Park], Fails::Start);
        assert_eq!(heard, [FromAgent::Failed { reason: "no".into(), output: "oops".into() }]);
        assert!(!parked && matches!(result, Err(BootError::Failed(_))));
    }

    #[test]
    fn a_guest_that_cannot_be_parked_says_so() {
        let (heard, parked, result) = held(&[start(), FromNode::Park], Fails::Park);
        assert!(matches!(heard.as_slice(), [FromAgent::Ready { .. }, FromAgent::Failed { .. }]));
        assert!(parked && matches!(result, Err(BootError::Failed(_))));
    }

    #[test]
    fn what_comes_out_of_turn_parks_nothing() {
        let (_, parked, result) = held(&[FromNode::Park], Fails::Nothing);
        assert!(!parked && matches!(result, Err(BootError::Turn(_))));
        let (_, parked, result) = held(&[start(), start()], Fails::Nothing);
        assert!(!parked && matches!(result, Err(BootError::Turn(_))));
        let (_, parked, result) = held(&[start()], Fails::Nothing);
        assert!(!parked && matches!(result, Err(BootError::Frame(_))));
    }
}
