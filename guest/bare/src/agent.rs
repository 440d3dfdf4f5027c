//! Connections after the snapshot: a first frame, then requests to the function.

use alloc::{format, string::String, vec::Vec};
use core::{mem, time::Duration};

use stasis_guest_wire::{
    frame::{self, FrameError},
    wake::{Certificate, FromAgent, FromNode, Proof, Step, Wake},
};

use crate::function::{Function, Reply, Request};

/// What all connections share.
#[derive(Debug, Default)]
pub struct Agent {
    /// Drawn at power-on; the node compares it with the template's.
    pub boot_id: String,
    /// The last wake, proved.
    identity: Option<Identity>,
    function: Function,
}

/// What makes this VM different from every other one of its template.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Counts the lives of this VM.
    pub generation: u64,
    /// As ordered.
    pub hostname: String,
    /// As ordered.
    pub machine_id: String,
    /// As ordered.
    pub boot_nonce: String,
}

/// One connection.
#[derive(Debug, Default)]
pub struct Connection {
    input: Vec<u8>,
    stage: Stage,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The first frame is not whole.
    #[default]
    Greeting,
    /// Requests to the function come.
    Forwarding { life: u64 },
    /// A request is answered later; what comes meanwhile waits.
    Answering { life: u64 },
}

/// What a connection does next.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// To be sent.
    pub output: Vec<u8>,
    /// An answer that is due later: after how long.
    pub later: Option<Duration>,
    /// To be closed once the output is sent.
    pub ends: bool,
}

impl Turn {
    fn end(output: Vec<u8>) -> Self {
        Self { output, later: None, ends: true }
    }
}

impl Agent {
    /// One that nobody has woken.
    #[must_use]
    pub fn new(boot_id: String) -> Self {
        Self { boot_id, ..Self::default() }
    }

    /// Accepts only a generation above every one seen.
    fn wake(&mut self, wake: &Wake) -> FromAgent {
        if let Some(seen) =
            self.identity.as_ref().map(|identity| identity.generation).filter(|&seen| wake.generation <= seen)
        {
            let reason = format!("generation {} is not above {seen}", wake.generation);
            return FromAgent::Refused { step: None, reason };
        }
        let identity = Identity {
            generation: wake.generation,
            hostname: wake.hostname.clone(),
            machine_id: wake.machine_id.clone(),
            boot_nonce: wake.boot_nonce.clone(),
        };
        let certificate = Certificate {
            generation: identity.generation,
            kernel_boot_id: self.boot_id.clone(),
            boot_nonce: identity.boot_nonce.clone(),
            hostname: identity.hostname.clone(),
            machine_id: identity.machine_id.clone(),
            clock_lag_ns: 0,
            runtimes: 0,
            proofs: Step::ALL.map(|step| Proof { step, took: Duration::ZERO }).into(),
        };
        self.identity = Some(identity);
        FromAgent::Awake(certificate)
    }

    fn answer(&mut self, message: &FromNode) -> FromAgent {
        let refused = |reason: &str| FromAgent::Refused { step: None, reason: reason.into() };
        match message {
            FromNode::Wake(wake) => self.wake(wake),
            FromNode::Forward | FromNode::Pass if self.identity.is_some() => FromAgent::Forwarding,
            FromNode::Forward | FromNode::Pass => refused("nobody has woken this guest"),
            FromNode::Exec(_) => FromAgent::NoCommands,
            FromNode::Logs => FromAgent::Logs { output: String::new() },
        }
    }
}

impl Connection {
    /// Takes what has come.
    pub fn received(&mut self, bytes: &[u8], agent: &mut Agent) -> Turn {
        self.input.extend_from_slice(bytes);
        let mut turn = match self.stage {
            Stage::Greeting => match self.greet(agent) {
                Ok(Some(turn)) => turn,
                Ok(None) => return Turn::default(),
                Err(error) => return refuse(&error),
            },
            Stage::Forwarding { .. } | Stage::Answering { .. } => Turn::default(),
        };
        if !turn.ends {
            self.serve(agent, &mut turn);
        }
        turn
    }

    /// The time of the answer that was due later has come.
    pub fn due(&mut self, agent: &mut Agent) -> Turn {
        let mut turn = Turn::default();
        if let Stage::Answering { life } = self.stage {
            self.stage = Stage::Forwarding { life };
            turn.output = Reply::ok("waited\n").encode();
            self.serve(agent, &mut turn);
        }
        turn
    }

    /// Whether it belongs to an earlier life than the agent's.
    #[must_use]
    pub fn is_stale(&self, agent: &Agent) -> bool {
        let now = agent.identity.as_ref().map(|identity| identity.generation);
        match self.stage {
            Stage::Greeting => false,
            Stage::Forwarding { life } | Stage::Answering { life } => now != Some(life),
        }
    }

    fn greet(&mut self, agent: &mut Agent) -> Result<Option<Turn>, FrameError> {
        let Some((header, rest)) = self.input.split_first_chunk::<4>() else { return Ok(None) };
        let length = frame::body_length(*header)?;
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let message = frame::decode(body)?;
        self.input.drain(..4 + length);
        let answer = agent.answer(&message);
        let output = if message == FromNode::Pass { Vec::new() } else { frame::encode(&answer)? };
        let goes_on = matches!(answer, FromAgent::Awake(_) | FromAgent::Forwarding);
        match &agent.identity {
            Some(identity) if goes_on => {
                self.stage = Stage::Forwarding { life: identity.generation };
                Ok(Some(Turn { output, ..Turn::default() }))
            }
            _ => Ok(Some(Turn::end(output))),
        }
    }

    /// Answers the requests that are there in full.
    fn serve(&mut self, agent: &mut Agent, turn: &mut Turn) {
        let Some(identity) = &agent.identity else { return };
        while let Stage::Forwarding { life } = self.stage {
            let (request, length) = match Request::parse(&self.input) {
                Ok(Some(whole)) => whole,
                Ok(None) => return,
                Err(refusal) => {
                    turn.output.extend(refusal.encode());
                    turn.ends = true;
                    return;
                }
            };
            match agent.function.call(&request, identity) {
                Reply::Later(after) => {
                    turn.later = Some(after);
                    self.stage = Stage::Answering { life };
                }
                reply => turn.output.extend(reply.encode()),
            }
            turn.ends |= request.closes;
            let rest = self.input.split_off(length);
            drop(mem::replace(&mut self.input, rest));
        }
    }
}

fn refuse(error: &FrameError) -> Turn {
    let refused = FromAgent::Refused { step: None, reason: format!("{error}") };
    Turn::end(frame::encode(&refused).unwrap_or_default())
}

#[cfg(test)]
mod tests;
