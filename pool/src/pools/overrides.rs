//! What was set of pools while the node ran: kept in a file, so that it holds after a restart.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde::{Deserialize, Serialize};
use stasis_pool_api::{PoolPatch, TemplateName, Tenant};

/// Why what was set cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("what was set of pools, in {path:?}, cannot be read: {reason}; repair or remove the file")]
pub(crate) struct OverridesError {
    path: PathBuf,
    reason: String,
}

/// Why a change was not made.
#[derive(Debug)]
pub(super) enum ChangeError {
    /// It would be impossible, for this reason.
    Refused(String),
    /// It cannot be written down.
    Store(io::Error),
}

/// One line of the file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Override {
    tenant: Tenant,
    template: TemplateName,
    set: PoolPatch,
}

/// All that was set.
#[derive(Debug)]
pub(super) struct Overrides {
    path: PathBuf,
    all: Mutex<Vec<Override>>,
}

impl Overrides {
    /// Reads the file, if there is one.
    pub(super) fn open(path: PathBuf) -> Result<Self, OverridesError> {
        let all = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| error.to_string()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error.to_string()),
        };
        match all {
            Ok(all) => Ok(Self { path, all: Mutex::new(all) }),
            Err(reason) => Err(OverridesError { path, reason }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Override>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn get(&self, tenant: &Tenant, template: &TemplateName) -> Option<PoolPatch> {
        let all = self.lock();
        all.iter().find(|one| one.tenant == *tenant && one.template == *template).map(|one| one.set.clone())
    }

    /// Who has set something of a template's pools.
    pub(super) fn tenants(&self, template: &TemplateName) -> Vec<Tenant> {
        self.lock().iter().filter(|one| one.template == *template).map(|one| one.tenant.clone()).collect()
    }

    /// Adds to what was set, if `check` allows the whole, and hands the whole back. Nothing has changed if it fails.
    pub(super) fn change(
        &self,
        tenant: &Tenant,
        template: &TemplateName,
        patch: &PoolPatch,
        check: impl FnOnce(&PoolPatch) -> Result<(), String>,
    ) -> Result<PoolPatch, ChangeError> {
        let mut all = self.lock();
        let place = all.iter().position(|one| one.tenant == *tenant && one.template == *template);
        let before = place.and_then(|place| all.get(place)).map(|one| one.set.clone()).unwrap_or_default();
        let set = before.then(patch);
        check(&set).map_err(ChangeError::Refused)?;
        let mut next = all.clone();
        next.retain(|one| one.tenant != *tenant || one.template != *template);
        next.push(Override { tenant: tenant.clone(), template: template.clone(), set: set.clone() });
        self.write(&next).map_err(ChangeError::Store)?;
        *all = next;
        Ok(set)
    }

    /// Whole, or not at all: a node that is killed meanwhile finds one or the other.
    fn write(&self, all: &[Override]) -> io::Result<()> {
        let staged = self.path.with_extension("new");
        let mut file = File::create(&staged)?;
        file.write_all(&serde_json::to_vec_pretty(all)?)?;
        file.sync_all()?;
        fs::rename(&staged, &self.path)?;
        match self.path.parent() {
            Some(folder) => File::open(folder)?.sync_all(),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_set_is_there_again_and_what_was_refused_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pools.json");
        let (a, b): (Tenant, Tenant) = ("a".parse().unwrap(), "b".parse().unwrap());
        let template: TemplateName = "x".parse().unwrap();
        let overrides = Overrides::open(path.clone()).unwrap();
        let set = |min| PoolPatch { min: Some(min), ..PoolPatch::default() };
        let hot = PoolPatch { hot: Some(1), ..PoolPatch::default() };
        overrides.change(&a, &template, &set(2), |_| Ok(())).unwrap();
        overrides.change(&a, &template, &hot, |_| Ok(())).unwrap();
        overrides.change(&b, &template, &set(7), |_| Ok(())).unwrap();
        let refused = overrides.change(&a, &template, &set(99), |whole| {
            assert_eq!((whole.min, whole.hot), (Some(99), Some(1)));
            Err("too many".into())
        });
        assert!(matches!(refused, Err(ChangeError::Refused(_))));

        let again = Overrides::open(path.clone()).unwrap();
        assert_eq!(again.get(&a, &template), Some(set(2).then(&hot)));
        assert_eq!(again.get(&b, &template), Some(set(7)));
        assert_eq!(again.tenants(&template).len(), 2);
        assert_eq!(again.get(&b, &"y".parse().unwrap()), None);

        fs::write(&path, "[{").unwrap();
        let damaged = Overrides::open(path).unwrap_err().to_string();
        assert!(damaged.contains("pools.json") && damaged.contains("remove the file"), "{damaged}");
    }
}
