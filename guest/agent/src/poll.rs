//! `poll(2)`, with what it reports given back by value.

use std::{
    io,
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

pub use nix::poll::PollFlags;
use nix::{
    errno::Errno,
    poll::{PollFd, PollTimeout},
};

/// Waits until one of `fds` has what it is asked for, or an error; what each reports, in the same order.
///
/// # Errors
/// What the kernel answered.
pub fn wait(fds: &[(BorrowedFd<'_>, PollFlags)]) -> io::Result<Vec<PollFlags>> {
    wait_until(fds, None)
}

/// As [`wait`], with nothing reported for any once the deadline has passed.
///
/// # Errors
/// What the kernel answered.
pub fn wait_until(fds: &[(BorrowedFd<'_>, PollFlags)], deadline: Option<Instant>) -> io::Result<Vec<PollFlags>> {
    let mut polled: Vec<_> = fds.iter().map(|(fd, events)| PollFd::new(*fd, *events)).collect();
    loop {
        let timeout =
            deadline.map_or(PollTimeout::NONE, |deadline| timeout(deadline.saturating_duration_since(Instant::now())));
        match nix::poll::poll(&mut polled, timeout) {
            Ok(_) => return Ok(polled.iter().map(|fd| fd.revents().unwrap_or(PollFlags::empty())).collect()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Rounded up, so that a wait does not end before its deadline.
fn timeout(left: Duration) -> PollTimeout {
    PollTimeout::try_from(left.as_millis().saturating_add(u128::from(!left.is_zero()))).unwrap_or(PollTimeout::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{io::Write, os::fd::AsFd, os::unix::net::UnixStream};

    #[test]
    fn it_reports_who_is_ready_and_ends_at_the_deadline() {
        let (mut near, far) = UnixStream::pair().unwrap();
        let started = Instant::now();
        let deadline = started + Duration::from_millis(20);
        let silent = wait_until(&[(far.as_fd(), PollFlags::POLLIN)], Some(deadline)).unwrap();
        assert!(silent[0].is_empty() && started.elapsed() >= Duration::from_millis(20));
        near.write_all(b"x").unwrap();
        let ready = wait(&[(near.as_fd(), PollFlags::POLLIN), (far.as_fd(), PollFlags::POLLIN)]).unwrap();
        assert!(ready[0].is_empty() && ready[1].contains(PollFlags::POLLIN));
    }
}
