//! What a server and its VMs take of the host.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{groups, host, http::Api, server::Server, world::becomes};

/// How long it may take to give things back on a loaded machine.
const SOON: Duration = Duration::from_secs(60);

/// How many there are of each kind. Whatever is not freed shows as a difference to an earlier one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ledger(pub(crate) Vec<(&'static str, usize)>);

impl Ledger {
    /// As it is now. `tenants`: the API with the key of each, whose sandboxes are counted.
    pub(crate) fn of(server: &Server, tenants: &[Api]) -> Self {
        let data = server.data().to_str().unwrap();
        let entries = |folder: &str| entries(&server.files().join(folder)).len();
        let processes = host::processes(server.data());
        let uids: BTreeSet<_> = processes.iter().filter_map(|(pid, _)| host::uid(*pid)).collect();
        let records = |api: &Api| api.get("/v1/sandboxes").success()["sandboxes"].as_array().unwrap().len();
        Self(vec![
            ("processes", processes.len()),
            ("uids", uids.len()),
            ("control groups", groups::below(server.data()).len()),
            ("mounts", host::mounts(data).len()),
            ("loop devices", host::loop_devices(data).len()),
            ("TAPs", host::taps()),
            (
                "templates",
                self::entries(&server.files().join("templates")).iter().map(|one| self::entries(one).len()).sum(),
            ),
            ("uploads", entries("uploads")),
            ("saved", entries("sandboxes")),
            ("kept", entries("vms")),
            ("records", tenants.iter().map(records).sum()),
        ])
    }

    /// How many there are of a kind.
    pub(crate) fn count(&self, of: &str) -> usize {
        self.0.iter().find(|(kind, _)| *kind == of).unwrap().1
    }

    /// Waits until all is as it was.
    pub(crate) fn returns(&self, server: &Server, tenants: &[Api]) {
        becomes(self, SOON, || Self::of(server, tenants));
    }
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path()).collect()
}
