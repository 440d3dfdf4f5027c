//! Signals for a process and all that it started.

use std::{fs, io};

use rustix::{
    io::Errno,
    process::{Pid, Signal, kill_process_group},
};

/// Sends `signal` to every process group of the session that `leader` leads: shells with job control make a group of each job. What began a
/// session of its own has left.
pub(super) fn send(leader: u32, signal: Signal) -> io::Result<()> {
    signal_group(leader, signal)?;
    // What is forked while we look is found by the next look; what is killed stays to be seen for a moment, so not for ever.
    let looks = if signal == Signal::KILL { 8 } else { 1 };
    for _ in 0..looks {
        let mut groups: Vec<u32> =
            members()?.filter(|member| member.session == leader && !member.dead).map(|member| member.group).collect();
        groups.sort_unstable();
        groups.dedup();
        groups.retain(|group| *group != leader || signal == Signal::KILL);
        if groups.is_empty() {
            return Ok(());
        }
        for group in groups {
            signal_group(group, signal)?;
        }
    }
    Ok(())
}

fn signal_group(group: u32, signal: Signal) -> io::Result<()> {
    let Some(group) = i32::try_from(group).ok().and_then(Pid::from_raw) else { return Ok(()) };
    match kill_process_group(group, signal) {
        // It has ended meanwhile.
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// A process, as `/proc` has it.
#[derive(Debug, PartialEq, Eq)]
struct Member {
    group: u32,
    session: u32,
    dead: bool,
}

fn members() -> io::Result<impl Iterator<Item = Member>> {
    let pids = fs::read_dir("/proc")?
        .flatten()
        .filter(|entry| entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit));
    // One that has ended meanwhile has no status.
    Ok(pids.filter_map(|entry| parse(&String::from_utf8_lossy(&fs::read(entry.path().join("stat")).ok()?))))
}

/// `pid (name) state parent group session …`, where the name may hold anything.
fn parse(stat: &str) -> Option<Member> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let dead = matches!(fields.next()?, "Z" | "X");
    Some(Member { group: fields.nth(1)?.parse().ok()?, session: fields.next()?.parse().ok()?, dead })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_read_whatever_the_name() {
        let wanted = Some(Member { group: 12, session: 11, dead: false });
        assert_eq!(parse("13 (a) S 1 2 3) R) S 10 12 11 0 -1"), wanted);
        assert_eq!(parse("13 (sh) Z 10 12 11 0 -1"), Some(Member { group: 12, session: 11, dead: true }));
        for broken in ["", "13 (sh", "13 (sh) S", "13 (sh) S 1 x 3"] {
            assert_eq!(parse(broken), None, "{broken}");
        }
    }
}
