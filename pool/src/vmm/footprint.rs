//! What memory a process has, as the kernel counts it.

use std::{fs, io};

/// A process's memory, in bytes (proc_pid_smaps(5)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// All pages that it has mapped.
    pub(crate) rss: u64,
    /// The same, with each page divided by the number of processes that have it.
    pub(crate) pss: u64,
}

impl Footprint {
    /// That of a process.
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "smaps_rollup has no Rss or no Pss"))
    }

    fn parse(rollup: &str) -> Option<Self> {
        let bytes = |name| {
            let line = rollup.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        };
        Some(Self { rss: bytes("Rss:")?, pss: bytes("Pss:")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_are_taken_from_their_own_lines() {
        let rollup = "5600-7ffe [rollup]\nRss:    2048 kB\nPss:     512 kB\nPss_Dirty:  8 kB\nShared_Clean: 1 kB\n";
        assert_eq!(Footprint::parse(rollup), Some(Footprint { rss: 2 << 20, pss: 512 << 10 }));
        for odd in ["", "Rss: 1 kB\n", "Rss: x kB\nPss: 1 kB\n", "Rss: 1\nPss: 1 kB\n"] {
            assert_eq!(Footprint::parse(odd), None, "{odd:?}");
        }
    }

    #[test]
    fn this_process_has_some() {
        let own = Footprint::of(std::process::id()).unwrap();
        assert!(own.pss > 0 && own.rss >= own.pss, "{own:?}");
        assert!(Footprint::of(u32::MAX).is_err());
    }
}
