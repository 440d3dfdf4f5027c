//! VMs that run and have proved their repair before anybody asks for them.
//!
//! ```text
//!  paused ─turn─▶ woken ─proved─▶ hot ──claim──▶ claimed
//!                   │ not: gone    │ ▲ the function closed the connection: another one
//!                                  └─┘ closed at once, or the process ended: gone
//! ```
//! The guest's clock runs with the host's, and nobody else has what its generators were seeded with: what the certificate proved when the
//! VM was woken is still so when it is claimed. It is the VM's one life: after a claim it is rewound like any other.

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

/// A VM that is ready for a request without any more work.
#[derive(Debug)]
pub(super) struct Hot {
    pub(super) awake: Awake,
    /// Since when its connection is open.
    connected: Instant,
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
        Self { awake, connected: Instant::now() }
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
        self.connected = Instant::now();
        Ok(self)
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
