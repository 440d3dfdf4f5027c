//! What can be refused before anything is touched, each in one line that says what to do.

use anyhow::{Context, bail};
use stasis_gateway::Tenants;

use super::UpArgs;
use crate::{doctor, running::Running};

/// Who may call.
pub(super) fn tenants(args: &UpArgs) -> anyhow::Result<Tenants> {
    let Some(path) = &args.tenants else { return Ok(Tenants::default()) };
    let text = std::fs::read_to_string(path).with_context(|| format!("the tenants' file {}", path.display()))?;
    Tenants::parse(&text).with_context(|| format!("the tenants' file {}", path.display()))
}

pub(super) fn check(args: &UpArgs) -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("stasis up must run as root: it mounts its data directory and opens /dev/kvm");
    }
    doctor::open_kvm()?;
    if !args.listen.ip().is_loopback() && !args.allow_remote {
        bail!(
            "--listen {} is not a loopback address, nothing is encrypted, and without --tenants no key is asked for: add --allow-remote if you mean it",
            args.listen
        );
    }
    tenants(args)?;
    let mut files = vec![("the guest kernel", args.kernel.clone())];
    for base in &args.bases {
        files.push(("the base image", super::parse_base(base)?.image));
    }
    for (what, path) in files {
        std::fs::File::open(&path).with_context(|| format!("{what} {}: `make up` builds it", path.display()))?;
    }
    if let Some(running) = Running::find(&args.data) {
        bail!("a stasis runs in {} already (process {}): `make down` stops it", args.data.display(), running.pid);
    }
    Ok(())
}
