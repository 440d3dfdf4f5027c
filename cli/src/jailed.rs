//! The roles that only the node starts, by hundreds. Their command lines are read by hand: to prepare clap's parser takes longer than they do until
//! they are in the jail.

use std::{ffi::OsString, process::ExitCode};

use anyhow::{Context as _, bail};

use crate::LogArgs;

/// Values of `STASIS_LOG_JSON` that mean no, as clap reads them.
const NO: [&str; 7] = ["", "n", "no", "f", "false", "off", "0"];

/// A role in a jail, and the user that it becomes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Jailed {
    /// One microVM.
    Vmm { uid: u32 },
    /// What fills the memory of a template's microVMs.
    Pager { uid: u32 },
}

impl Jailed {
    /// What the arguments, without the program's name, say: none of these roles (None), or one and its `--uid`.
    pub(crate) fn read(mut arguments: impl Iterator<Item = OsString>) -> Option<anyhow::Result<Self>> {
        let role: fn(u32) -> Self = match arguments.next()?.to_str()? {
            "vmm" => |uid| Self::Vmm { uid },
            "pager" => |uid| Self::Pager { uid },
            _ => return None,
        };
        Some(uid_in(arguments).map(role))
    }

    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let end = match self {
            Self::Vmm { uid } => stasis_vmm::control_socket()
                .and_then(|control| stasis_vmm::jail::enter(uid).map(|pagemap| (control, pagemap)))
                .and_then(|(control, pagemap)| stasis_vmm::serve(control, pagemap)),
            Self::Pager { uid } => stasis_vmm::control_socket()
                .and_then(|control| stasis_vmm::jail::enter(uid).map(|_| control))
                .and_then(stasis_vmm::serve_images),
        };
        end.map(|()| ExitCode::SUCCESS).map_err(|error| anyhow::anyhow!(error.chain()))
    }
}

fn uid_in(mut arguments: impl Iterator<Item = OsString>) -> anyhow::Result<u32> {
    const USAGE: &str = "this is started by the node, never by hand: `stasis vmm --uid UID`, `stasis pager --uid UID`";
    match (arguments.next(), arguments.next(), arguments.next()) {
        (Some(name), Some(uid), None) if name == "--uid" => {
            uid.to_str().and_then(|uid| uid.parse().ok()).context(USAGE)
        }
        _ => bail!(USAGE),
    }
}

/// How to log, from the environment alone.
#[allow(clippy::disallowed_methods, reason = "this is the argument parser of these roles")]
pub(crate) fn log_args() -> LogArgs {
    let json = std::env::var("STASIS_LOG_JSON").unwrap_or_default().to_lowercase();
    let log = std::env::var("STASIS_LOG").unwrap_or_else(|_| "info".into());
    LogArgs { log, log_json: !NO.contains(&json.as_str()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_role_with_its_uid_is_taken() {
        let read = |line: &str| Jailed::read(line.split_whitespace().map(OsString::from));
        assert_eq!(read("vmm --uid 7").unwrap().unwrap(), Jailed::Vmm { uid: 7 });
        assert_eq!(read("pager --uid 8").unwrap().unwrap(), Jailed::Pager { uid: 8 });
        for other in ["", "up", "vmms --uid 7", "--log vmm"] {
            assert!(read(other).is_none(), "{other:?}");
        }
        for wrong in
            ["vmm", "vmm --uid", "vmm --uid x", "vmm --uid -1", "vmm --uid 7 more", "pager 7 --uid", "vmm --help"]
        {
            let refusal = read(wrong).unwrap().unwrap_err().to_string();
            assert!(refusal.contains("started by the node"), "{wrong:?}: {refusal}");
        }
    }
}
