//! What the host shows of a server: processes, mounts, loop devices.

use std::{fs, os::fd::OwnedFd, path::Path, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use crate::groups;

/// A process, held by its descriptor, so that a reused id is never mistaken for it.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    handle: OwnedFd,
}

impl Process {
    /// None if it has gone.
    pub(crate) fn open(pid: u32) -> Option<Self> {
        let handle = pidfd_open(Pid::from_raw(pid.cast_signed())?, PidfdFlags::empty()).ok()?;
        Some(Self { pid, handle })
    }

    pub(crate) fn children_of(parent: u32) -> Vec<Self> {
        let tasks = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().filter_map(Result::ok);
        let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
        let text: String = lists.collect();
        text.split_whitespace().filter_map(|pid| Self::open(pid.parse().ok()?)).collect()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        // It may have ended meanwhile.
        let _ = pidfd_send_signal(&self.handle, signal);
    }

    /// Waits for its end.
    pub(crate) fn ends_within(&self, limit: Duration) -> bool {
        let limit = Timespec { tv_sec: limit.as_secs().cast_signed(), tv_nsec: i64::from(limit.subsec_nanos()) };
        poll(&mut [PollFd::new(&self.handle, PollFlags::IN)], Some(&limit)).unwrap() > 0
    }
}

/// Whether a text names a folder, or what is below it, and not one beside it whose name begins with the same letters.
fn names(text: &str, folder: &str) -> bool {
    let ends = |rest: &str| !rest.starts_with(|next: char| next.is_alphanumeric() || "-_.".contains(next));
    text.match_indices(folder).any(|(at, found)| ends(&text[at + found.len()..]))
}

/// Processes that were started for this data directory, and their command lines.
pub(crate) fn processes(data: &Path) -> Vec<(u32, String)> {
    let data = data.to_str().unwrap();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().filter_map(Result::ok) {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let of = |file| fs::read(entry.path().join(file)).unwrap_or_default();
        let command = String::from_utf8_lossy(&of("cmdline")).replace('\0', " ");
        // A VM's process is told no path, but holds its disk.
        let holds = || {
            let files = fs::read_dir(entry.path().join("fd")).into_iter().flatten().filter_map(Result::ok);
            files.filter_map(|file| fs::read_link(file.path()).ok()).any(|file| names(&file.to_string_lossy(), data))
        };
        let environment = names(&String::from_utf8_lossy(&of("environ")), data);
        if names(&command, data)
            || environment
            || ([" vmm ", " pager "].iter().any(|role| command.contains(role)) && holds())
        {
            found.push((pid, command));
        }
    }
    found
}

/// The user as whom a process runs; none if it has gone.
pub(crate) fn uid(pid: u32) -> Option<u32> {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(format!("/proc/{pid}/task")).ok().map(|about| about.uid())
}

/// How many files a process has open.
pub(crate) fn files_of(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// Processes that were started for this data directory, their control groups, mounts in it, loop devices of files in it.
pub(crate) fn leftovers(data: &Path) -> Vec<String> {
    let mut left: Vec<_> =
        processes(data).into_iter().map(|(pid, command)| format!("process {pid}: {command}")).collect();
    left.extend(groups::below(data).into_iter().map(|group| format!("control group {}", group.display())));
    let data = data.to_str().unwrap();
    left.extend(mounts(data).into_iter().map(|mount| format!("mount {mount}")));
    left.extend(loop_devices(data).into_iter().map(|device| format!("loop device {device}")));
    left
}

/// Mount points below a folder.
pub(crate) fn mounts(folder: &str) -> Vec<String> {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().filter(|line| names(line, folder)).map(str::to_owned).collect()
}

/// Loop devices whose file is below a folder.
pub(crate) fn loop_devices(folder: &str) -> Vec<String> {
    let devices = fs::read_dir("/sys/block").unwrap().filter_map(Result::ok);
    let backed = devices.filter_map(|device| {
        let file = fs::read_to_string(device.path().join("loop/backing_file")).ok()?;
        Some(format!("{} of {}", device.file_name().display(), file.trim()))
    });
    backed.filter(|text| names(text, folder)).collect()
}

/// TAP devices of this machine, whoever made them: none is made yet, and nothing of one names a server.
pub(crate) fn taps() -> usize {
    let devices = fs::read_dir("/sys/class/net").unwrap().filter_map(Result::ok);
    devices.filter(|device| device.path().join("tun_flags").exists()).count()
}

/// Blocks of 512 bytes and files in use on the file system of a folder, those of deleted files that somebody has open among them.
pub(crate) fn used(folder: &Path) -> [u64; 2] {
    let about = rustix::fs::statvfs(folder).unwrap();
    [(about.f_blocks - about.f_bfree) * (about.f_frsize / 512), about.f_files - about.f_ffree]
}

/// Blocks of 512 bytes that a file has; none if there is no such file.
pub(crate) fn blocks_of(file: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(file).map_or(0, |about| about.blocks())
}
