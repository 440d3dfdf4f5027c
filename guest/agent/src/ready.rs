//! Whether the function answers on its port.
//!
//! No event tells that another process listens, so connecting is tried again at growing intervals; the function's end
//! is an event, and ends the wait at once.

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use crate::child::{End, Exit};

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// How many null requests are measured, and how long one may take to be counted.
const NULL_REQUESTS: usize = 5;
const NULL_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the rest of an answer is read once its status is known.
const REST: Duration = Duration::from_secs(1);

/// Why the function is not ready.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotReady {
    /// Its process ended.
    #[error("the start command {exit} before it {}", .probe.done())]
    Exited {
        /// How.
        exit: Exit,
        /// What was waited for.
        probe: Probe,
    },
    /// Nobody accepted connections.
    #[error("nothing listened on port {} within {timeout:?}", .probe.port)]
    Silent {
        /// What was waited for.
        probe: Probe,
        /// How long.
        timeout: Duration,
    },
    /// Connections were accepted, but no HTTP came back.
    #[error("GET {} on port {} got no HTTP answer within {timeout:?}", .probe.path(), .probe.port)]
    Mute {
        /// What was waited for.
        probe: Probe,
        /// How long.
        timeout: Duration,
    },
    /// The readiness path answered that it is not.
    #[error("GET {} on port {} answered {status} until the deadline of {timeout:?}", .probe.path(), .probe.port)]
    Answered {
        /// What was waited for.
        probe: Probe,
        /// Its last answer.
        status: u16,
        /// How long.
        timeout: Duration,
    },
}

/// What counts as ready.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// A connection to this port is accepted,
    pub port: u16,
    /// and a `GET` of this path, if there is one, is answered with a status below 500.
    pub path: Option<String>,
}

/// What one try found.
enum Found {
    Nobody,
    NoHttp,
    Status(u16),
    Ready,
}

impl Probe {
    fn path(&self) -> &str {
        self.path.as_deref().unwrap_or("/")
    }

    fn done(&self) -> String {
        match &self.path {
            Some(path) => format!("answered GET {path} on port {}", self.port),
            None => format!("listened on port {}", self.port),
        }
    }

    /// Waits until the function is ready; how long that took since `started`.
    ///
    /// # Errors
    /// It ended, or the time was over.
    pub fn wait(&self, started: Instant, timeout: Duration, end: &End) -> Result<Duration, NotReady> {
        let deadline = started + timeout;
        let mut pause = FIRST_PAUSE;
        loop {
            let found = self.try_once(deadline);
            if matches!(found, Found::Ready) {
                return Ok(started.elapsed());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if let Some(exit) = end.within(pause.min(left)) {
                return Err(NotReady::Exited { exit, probe: self.clone() });
            }
            if left.is_zero() {
                let probe = self.clone();
                return Err(match found {
                    Found::Status(status) => NotReady::Answered { probe, status, timeout },
                    Found::NoHttp => NotReady::Mute { probe, timeout },
                    Found::Nobody | Found::Ready => NotReady::Silent { probe, timeout },
                });
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Times of a few requests, each from connect to the answer's end (without a path: connects). Only those that
    /// were measured: a function that answers none gives none.
    #[must_use]
    pub fn null_requests(&self) -> Vec<Duration> {
        let measure = |_| {
            let started = Instant::now();
            let deadline = started + NULL_TIMEOUT;
            let mut stream = connect(self.port, deadline).ok()?;
            if let Some(path) = &self.path {
                get(&mut stream, path, self.port, deadline).ok()?;
                io::copy(&mut stream, &mut io::sink()).ok()?;
            }
            Some(started.elapsed())
        };
        (0..NULL_REQUESTS).map_while(measure).collect()
    }

    fn try_once(&self, deadline: Instant) -> Found {
        let Ok(mut stream) = connect(self.port, deadline) else { return Found::Nobody };
        let Some(path) = &self.path else { return Found::Ready };
        match get(&mut stream, path, self.port, deadline) {
            Err(_) => Found::NoHttp,
            Ok(status) => {
                // A server that is hung up on in mid-answer complains; what comes of this is not of interest.
                let _ = stream.set_read_timeout(Some(REST));
                let _ = io::copy(&mut (&mut stream).take(1 << 20), &mut io::sink());
                if status < 500 { Found::Ready } else { Found::Status(status) }
            }
        }
    }
}

/// Time left, but never none: the standard library takes zero for a mistake.
fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

fn connect(port: u16, deadline: Instant) -> io::Result<TcpStream> {
    TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)), left(deadline))
}

/// Sends a request and reads the status line's beginning, `HTTP/1.x NNN`.
fn get(stream: &mut TcpStream, path: &str, port: u16, deadline: Instant) -> io::Result<u16> {
    stream.set_read_timeout(Some(left(deadline)))?;
    stream.set_write_timeout(Some(left(deadline)))?;
    stream.write_all(
        format!("GET {path} HTTP/1.1\r\nHost: localhost:{port}\r\nAccept: */*\r\nConnection: close\r\n\r\n").as_bytes(),
    )?;
    let mut line = [0; 12];
    stream.read_exact(&mut line)?;
    status(&line).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not HTTP"))
}

fn status(line: &[u8]) -> Option<u16> {
    str::from_utf8(line).ok()?.strip_prefix("HTTP/1.")?.get(2..)?.parse().ok()
}

#[cfg(test)]
mod tests;
