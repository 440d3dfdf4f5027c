//! One VMM process without a VM, to see that this host lets it into the jail.

use std::path::Path;

use stasis_vmm_api::{MachineSpec, Request};

use super::{Spawner, Vmm, VmmError};
use crate::{admission::Admission, cgroup::Groups, config::Jail};

/// Starts `program` as a VMM process, jailed, and waits for an answer of it, which it gives only from inside.
///
/// # Errors
/// Why it cannot be started. Why it cannot be jailed it says itself, on standard error.
pub async fn try_jail(program: &Path, jail: &Jail) -> Result<(), String> {
    let chain = |error: &dyn std::error::Error| error.to_string();
    let spawner = Spawner::start(program, jail.environment.clone(), jail.uid_base, Groups::none())
        .map_err(|error| format!("the empty namespaces cannot be made: {error}"))?;
    let nothing = Admission::new(1 << 30).reserve(0).map_err(|error| chain(&error))?;
    let machine = MachineSpec::default();
    let (vmm, _) = Vmm::spawn(&spawner, &machine, nothing).await.map_err(|error| chain(&error))?;
    match vmm.call(Request::Console, Vec::new()).await {
        // It has no VM whose console could be asked for.
        Err(VmmError::Failed(_)) => Ok(()),
        Err(error) => Err(chain(&error)),
        Ok(reply) => Err(chain(&VmmError::Protocol(Box::new(reply)))),
    }
}
