//! Where the server of this run is.

use std::{env, ffi::OsString, fs::File, path::PathBuf};

/// Where the server runs.
#[derive(Debug, Clone)]
pub(crate) enum Lane {
    /// Elsewhere, behind this URL.
    Rig { url: String },
    /// Here: the suite starts it.
    Direct,
}

impl Lane {
    /// The lane, or what is missing for one.
    pub(crate) fn of_this_machine() -> Result<Self, String> {
        if let Some(url) = variable("STASIS_E2E_URL") {
            return Ok(Self::Rig { url: url.to_string_lossy().trim_end_matches('/').to_owned() });
        }
        if !rustix::process::geteuid().is_root() {
            return Err("not root, and no STASIS_E2E_URL".into());
        }
        if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
            return Err(format!("/dev/kvm: {error}, and no STASIS_E2E_URL"));
        }
        match ["STASIS_KERNEL", "STASIS_BASES"].into_iter().find(|name| variable(name).is_none()) {
            Some(name) => Err(format!("{name} is not set, and no STASIS_E2E_URL")),
            None => Ok(Self::Direct),
        }
    }

    pub(crate) const fn has_the_host(&self) -> bool {
        matches!(self, Self::Direct)
    }
}

/// The binary under test.
pub(crate) fn binary() -> PathBuf {
    variable("STASIS_BIN").map_or_else(|| env!("CARGO_BIN_EXE_stasis").into(), PathBuf::from)
}

/// The bare guest (`scripts/bare.sh`), if there is one.
pub(crate) fn bare() -> Option<PathBuf> {
    variable("STASIS_BARE").map(PathBuf::from)
}

/// How often something is done, unless the environment says otherwise.
pub(crate) fn number(name: &str, otherwise: u64) -> u64 {
    let Some(value) = variable(name) else { return otherwise };
    value.to_str().and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name}: {value:?} is no number"))
}

/// A variable that is set.
pub(crate) fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}
