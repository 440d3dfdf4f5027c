//! VMs that run and have proved their repair before anybody asks for them.
//!
//! ```text
//!  paused ─turn─▶ woken ─proved─▶ hot ──claim──▶ claimed
//!                   │ not: gone    │ ▲ the function closed the connection: another one
//!                                  └─┘ closed at once, or the process ended: gone
//! ```
//! The guest's clock runs with the host's, and nobody else has what its generators were seeded with: what the certificate proved when the
//! VM was woken is still so when it is claimed. It is the VM's one life: after a claim it is rewound like any other. What can go wrong
//! while it waits without any event is that the guest hangs, so its agent is asked something every [`ASK_EVERY`].

use std::{
    io,
    os::fd::AsRawFd,
    task::{Context, Poll},
    time::Duration,
};

use nix::sys::socket::{MsgFlags, recv};
use stasis_guest_wire::AGENT_PORT;
use stasis_vmm_api::Request;
use tokio::{io::Interest, net::UnixStream, time::Instant};

use super::stock::Vm;
use crate::{
    agent,
    restore::{Awake, Paused, RestoreError},
    vmm::VmmError,
};

/// A connection that was closed before this age is not replaced: the function would close the next one, too.
const YOUNG: Duration = Duration::from_secs(1);
/// Longest time that another connection may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// How often the agent of a hot VM is asked whether it is there. Chosen: a guest that hangs is found out within this and [`ANSWER_LIMIT`], for
/// a few messages a minute.
const ASK_EVERY: Duration = Duration::from_secs(15);
/// Longest time that its answer may take: it tells 64 KiB at most.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// A VM that is ready for a request without any more work.
#[derive(Debug)]
pub(super) struct Hot {
    pub(super) awake: Awake,
    /// Since when its connection is open.
    connected: Instant,
    /// When its agent is to be asked next; none while it is.
    ask_at: Option<Instant>,
}

impl Vm for Hot {
    fn lives(&self) -> bool {
        self.awake.slot.vmm.is_alive()
    }
}

impl Vm for Paused {
    fn lives(&self) -> bool {
        self.slot.vmm.is_alive()
    }
}

impl From<Awake> for Hot {
    fn from(awake: Awake) -> Self {
        let now = Instant::now();
        Self { awake, connected: now, ask_at: Some(now + ASK_EVERY) }
    }
}

impl Hot {
    /// Whether the connection to its function was closed, or something came over it unasked; else wakes the task when that happens.
    pub(super) fn poll_spoiled(&self, cx: &mut Context<'_>) -> bool {
        let stream = &self.awake.stream;
        loop {
            match stream.poll_read_ready(cx) {
                Poll::Pending => return false,
                Poll::Ready(Err(_)) => return true,
                // Readiness that is left from the certificate's last byte is no news: looking makes tokio forget it.
                Poll::Ready(Ok(())) => match stream.try_io(Interest::READABLE, || peek(stream)) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    _ => return true,
                },
            }
        }
    }

    /// Whether another connection is worth its while.
    pub(super) fn is_old(&self) -> bool {
        self.connected.elapsed() >= YOUNG
    }

    /// Gives it another connection.
    pub(super) async fn reconnect(mut self) -> Result<Self, RestoreError> {
        match tokio::time::timeout(CONNECT_LIMIT, self.connect()).await {
            Ok(Ok(stream)) => self.awake.stream = stream,
            Ok(Err(error)) => return Err(error),
            Err(_) => return Err(RestoreError::Late("a connection to the function", CONNECT_LIMIT)),
        }
        let now = Instant::now();
        self.connected = now;
        self.ask_at = Some(now + ASK_EVERY);
        Ok(self)
    }

    /// When its agent is to be asked whether it is there; none while it is.
    pub(super) const fn ask_at(&self) -> Option<Instant> {
        self.ask_at
    }

    /// Asks its agent, over a connection of its own. The VM can be claimed meanwhile, and ends when it would without this.
    pub(super) fn ask(&mut self) -> impl Future<Output = Result<(), RestoreError>> + Send + use<> {
        self.ask_at = None;
        let pair = agent::stream_pair().map_err(|error| VmmError::Failed(error.to_string()));
        let asked = pair.map(|(near, far)| {
            let request = Request::Connect { port: AGENT_PORT };
            (near, self.awake.slot.vmm.order_apart(request, vec![far.into()]))
        });
        async {
            let (mut near, connected) = asked?;
            let answered = async {
                connected.await?;
                // What the function has printed is of no interest: this is the question that changes nothing in the guest.
                agent::logs(&mut near).await?;
                Ok(())
            };
            match tokio::time::timeout(ANSWER_LIMIT, answered).await {
                Ok(answered) => answered,
                Err(_) => Err(RestoreError::Late("an answer of a hot VM's agent", ANSWER_LIMIT)),
            }
        }
    }

    /// Its agent has answered.
    pub(super) fn answered(&mut self) {
        self.ask_at = Some(Instant::now() + ASK_EVERY);
    }

    async fn connect(&self) -> Result<UnixStream, RestoreError> {
        let (mut near, far) = agent::stream_pair().map_err(|error| VmmError::Failed(error.to_string()))?;
        self.awake.slot.vmm.order(Request::Connect { port: AGENT_PORT }, vec![far.into()]).await?;
        agent::forward(&mut near).await?;
        Ok(near)
    }
}

fn peek(stream: &UnixStream) -> io::Result<usize> {
    Ok(recv(stream.as_raw_fd(), &mut [0], MsgFlags::MSG_PEEK)?)
}
