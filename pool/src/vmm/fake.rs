//! A VMM "process" without a VM, for tests of the state machines: it answers requests, and plays the agent on every connection.

use std::{
    os::{fd::OwnedFd, unix::net::UnixStream as StdUnixStream},
    sync::Arc,
    time::Duration,
};

use stasis_guest_wire::wake::{Certificate, FromAgent, FromNode, Proof, Step};
use stasis_vmm_api::{FromVmm, MAX_FDS, MAX_PACKET, Reply, Request, RewindReport};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};
use tokio_seqpacket::{
    UnixSeqpacket,
    ancillary::{AncillaryMessageWriter, OwnedAncillaryMessage},
};

use super::{GuestStreams, Vmm};
use crate::{admission::Reservation, agent};

const ZERO: Duration = Duration::ZERO;
/// After how long a function tires.
const PATIENCE: Duration = Duration::from_secs(60);

/// How the fake's agent behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Agent {
    /// Proves everything.
    Honest,
    /// Refuses at this step.
    Refuses(Step),
    /// Leaves out the proof of this step.
    Omits(Step),
    /// Was booted, not restored.
    Booted,
    /// The VM's process ends as soon as the guest runs.
    Dies,
    /// Never answers.
    Silent,
    /// Its VM cannot be rewound.
    KeepsTraces,
    /// Proves everything; the function says hello when it is asked.
    Polite,
    /// Proves everything; the function closes every connection at once.
    HangsUp,
    /// As polite, but the function closes the first connection when nothing has come over it for a while.
    Tires,
}

/// A handle whose other end is a task of this process. What the "function" says first is `hello`.
pub(crate) fn start(agent: Agent, reservation: Reservation) -> (Vmm, GuestStreams) {
    let (ours, theirs) = UnixSeqpacket::pair().unwrap();
    tokio::spawn(serve(Arc::new(theirs), agent));
    Vmm::over(ours, None, reservation)
}

async fn serve(socket: Arc<UnixSeqpacket>, behaviour: Agent) {
    let mut packet = vec![0; MAX_PACKET];
    loop {
        let mut space = [0; 64 + MAX_FDS * 4];
        let mut parts = [std::io::IoSliceMut::new(&mut packet)];
        let Ok((info, ancillary)) = socket.recv_vectored_with_ancillary(&mut parts, &mut space).await else { return };
        let mut files: Vec<OwnedFd> = Vec::new();
        for message in ancillary.into_messages() {
            if let OwnedAncillaryMessage::FileDescriptors(descriptors) = message {
                files.extend(descriptors);
            }
        }
        if info.bytes_read() == 0 {
            return;
        }
        let reply = match serde_json::from_slice(&packet[..info.bytes_read()]).unwrap() {
            Request::Connect { .. } => {
                tokio::spawn(converse(files.remove(0).into(), behaviour));
                Reply::Done
            }
            Request::Resume if behaviour == Agent::Dies => return,
            Request::Rewind if behaviour == Agent::KeepsTraces => Reply::Failed { reason: "told to".into() },
            Request::Rewind => Reply::Rewound(RewindReport { dirty_bytes: 4096, memory: ZERO, state: ZERO }),
            Request::Console => Reply::Console { tail: "last words".into() },
            _ => Reply::Done,
        };
        let bytes = serde_json::to_vec(&FromVmm::Reply(reply)).unwrap();
        let mut none = [0; 0];
        let mut nothing = AncillaryMessageWriter::new(&mut none);
        if socket.send_vectored_with_ancillary(&[std::io::IoSlice::new(&bytes)], &mut nothing).await.is_err() {
            return;
        }
    }
}

async fn converse(stream: StdUnixStream, behaviour: Agent) {
    stream.set_nonblocking(true).unwrap();
    let mut stream = UnixStream::from_std(stream).unwrap();
    let wake = match agent::receive(&mut stream).await {
        Ok(FromNode::Wake(wake)) => wake,
        Ok(FromNode::Forward) => {
            if agent::send(&mut stream, &FromAgent::Forwarding).await.is_ok() {
                if matches!(behaviour, Agent::Polite | Agent::Tires) && stream.read_u8().await.is_err() {
                    return;
                }
                // The caller may be gone.
                let _ = stream.write_all(b"hello").await;
                // Open until the caller ends it.
                let _ = stream.read_u8().await;
            }
            return;
        }
        Err(_) => return,
    };
    if behaviour == Agent::Silent {
        return std::future::pending().await;
    }
    let steps = Step::ALL.into_iter().filter(|step| behaviour != Agent::Omits(*step));
    let answer = match behaviour {
        Agent::Refuses(step) => FromAgent::Refused { step: Some(step), reason: "told to".into() },
        _ => FromAgent::Awake(Certificate {
            generation: wake.generation,
            kernel_boot_id: if behaviour == Agent::Booted { "another boot" } else { "template's boot" }.into(),
            boot_nonce: wake.boot_nonce,
            hostname: wake.hostname,
            machine_id: wake.machine_id,
            clock_lag_ns: 0,
            runtimes: 0,
            proofs: steps.map(|step| Proof { step, took: ZERO }).collect(),
        }),
    };
    if agent::send(&mut stream, &answer).await.is_ok() && behaviour != Agent::HangsUp {
        if behaviour == Agent::Tires && tokio::time::timeout(PATIENCE, stream.read_u8()).await.is_err() {
            return;
        }
        if behaviour == Agent::Polite && stream.read_u8().await.is_err() {
            return;
        }
        // The claimer may be gone.
        let _ = stream.write_all(b"hello").await;
    }
}
