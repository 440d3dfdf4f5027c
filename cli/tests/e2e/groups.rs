//! Control groups that servers have made for their VMs, where the host has version 2 with controllers; none elsewhere.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::Mutex,
};

/// The servers that were started on each data directory: their groups bear their process ids.
static SERVERS: Mutex<BTreeMap<PathBuf, BTreeSet<u32>>> = Mutex::new(BTreeMap::new());

/// A server was started.
pub(crate) fn of_server(data: &Path, pid: u32) {
    SERVERS.lock().unwrap().entry(data.to_owned()).or_default().insert(pid);
}

/// Those of VMs, and those of servers that have ended with no VM in them, of all data directories at or below `data`.
pub(crate) fn below(data: &Path) -> Vec<PathBuf> {
    let Some(own) = own() else { return Vec::new() };
    let servers = SERVERS.lock().unwrap();
    let pids = servers.iter().filter(|(of, _)| of.starts_with(data)).flat_map(|(_, pids)| pids);
    pids.flat_map(|pid| of_one(&own.join(format!("stasis-{pid}")), *pid)).collect()
}

fn of_one(group: &Path, pid: u32) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(group) else { return Vec::new() };
    let folders = entries.filter_map(Result::ok).map(|entry| entry.path()).filter(|path| path.is_dir());
    let mut found: Vec<_> = folders.collect();
    if found.is_empty() && !Path::new("/proc").join(pid.to_string()).exists() {
        found.push(group.to_owned());
    }
    found
}

/// Where servers make theirs: this process's own group of version 2.
fn own() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let place = fields.into_iter().find(|fields| fields.get(2) == Some(&"cgroup2"))?[1].to_owned();
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap();
    let own = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    Some(Path::new(&place).join(own.trim_start_matches('/')))
}
