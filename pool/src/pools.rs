//! The templates in service, and for each the pools of its tenants.
//!
//! ```text
//!  publish ──▶ template ──first claim, or set──▶ a tenant's pool ──idle for long──▶ gone, until the next claim
//!                 └──newer version, or removed──▶ all its pools are drained
//! ```
//! The default tenant's pools begin with their template, and stay.

mod overrides;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use stasis_pool_api::{
    ClaimError, PoolPatch, PoolSpec, PoolStatus, SetPoolError, SpecError, TemplateCost, TemplateInfo, TemplateName,
    Tenant,
};

use self::overrides::Overrides;
pub(crate) use self::overrides::OverridesError;
use crate::{
    metrics,
    pool::{AllTaken, Place, Places, Pool, Shared, Taken, Tenancy},
    template::Template,
};

/// All templates in service.
#[derive(Debug)]
pub(crate) struct Pools {
    shared: Arc<Shared>,
    /// The tenant whose pools begin with their template.
    standing: Option<Tenant>,
    overrides: Overrides,
    templates: RwLock<Templates>,
}

#[derive(Debug, Default)]
struct Templates {
    in_service: BTreeMap<TemplateName, InService>,
    /// Templates that are refused, and why.
    refused: BTreeMap<TemplateName, String>,
}

#[derive(Debug)]
struct InService {
    template: Arc<Template>,
    pools: BTreeMap<Tenant, Pool>,
    /// Places for claims of all tenants.
    places: Places,
}

impl InService {
    fn new(template: Arc<Template>) -> Self {
        let places = Places::new(template.info().spec.pool.concurrency);
        Self { template, pools: BTreeMap::new(), places }
    }

    fn drain(&self) {
        self.pools.values().for_each(Pool::drain);
    }
}

impl Pools {
    /// Without templates yet. `settings`: the file in which what was set is kept.
    ///
    /// # Errors
    /// [`OverridesError`] if that cannot be read.
    pub(crate) fn new(
        shared: Arc<Shared>,
        standing: Option<Tenant>,
        settings: PathBuf,
    ) -> Result<Self, OverridesError> {
        let overrides = Overrides::open(settings)?;
        Ok(Self { shared, standing, overrides, templates: RwLock::default() })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn read(&self) -> RwLockReadGuard<'_, Templates> {
        self.templates.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Templates> {
        self.templates.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a template into service, and begins the pools that stand without a claim. What it replaces is drained, and handed back.
    pub(crate) fn publish(&self, template: Template) -> Option<Arc<Template>> {
        let template = Arc::new(template);
        let name = template.info().spec.name.clone();
        let mut fresh = InService::new(template);
        let standing = self.standing.iter().cloned().chain(self.overrides.tenants(&name));
        for tenant in standing {
            self.begin(&mut fresh, &tenant);
        }
        let old = {
            let mut templates = self.write();
            templates.refused.remove(&name);
            templates.in_service.insert(name, fresh)
        };
        old.map(|old| {
            old.drain();
            old.template
        })
    }

    /// Notes that a template cannot be used.
    pub(crate) fn refuse(&self, name: TemplateName, reason: String) {
        self.write().refused.insert(name, reason);
    }

    /// Takes a template out of service; whether there was one, be it refused.
    pub(crate) fn remove(&self, name: &TemplateName) -> bool {
        let mut templates = self.write();
        let (old, refused) = (templates.in_service.remove(name), templates.refused.remove(name));
        drop(templates);
        if let Some(old) = &old {
            old.drain();
        }
        old.is_some() || refused.is_some()
    }

    /// Takes all out of service.
    pub(crate) fn drain(&self) {
        let templates = std::mem::take(&mut *self.write());
        templates.in_service.values().for_each(InService::drain);
        // With its template ends a pager, which holds memory too.
    }

    pub(crate) fn template(&self, name: &TemplateName) -> Option<Arc<Template>> {
        self.read().in_service.get(name).map(|known| Arc::clone(&known.template))
    }

    /// What a VM of each template counts with.
    pub(crate) fn costs(&self) -> Vec<TemplateCost> {
        self.read().in_service.values().map(|known| known.template.cost()).collect()
    }

    pub(crate) fn infos(&self) -> Vec<TemplateInfo> {
        self.read().in_service.values().map(|known| known.template.info().clone()).collect()
    }

    pub(crate) fn knows(&self, name: &TemplateName) -> bool {
        let templates = self.read();
        templates.in_service.contains_key(name) || templates.refused.contains_key(name)
    }

    /// Whether it has been neither replaced nor removed.
    pub(crate) fn serves(&self, template: &Arc<Template>) -> bool {
        let templates = self.read();
        templates.in_service.get(&template.info().spec.name).is_some_and(|known| Arc::ptr_eq(&known.template, template))
    }

    /// Takes a VM of a template for a tenant, within `budget`.
    pub(crate) async fn take(
        &self,
        tenant: &Tenant,
        name: &TemplateName,
        budget: Duration,
    ) -> Result<Taken, ClaimError> {
        let started = Instant::now();
        let Some(of_all) = self.read().in_service.get(name).map(|known| known.places.clone()) else {
            return Err(self.not_served(name));
        };
        let of_all = place(name, &of_all)?;
        // A pool that is drained because its template was replaced, or that has just ended, sends its claims away: they go to its
        // successor.
        let mut drained = None;
        while let Some(pool) = self.pool(tenant, name).filter(|pool| drained.as_ref() != Some(pool)) {
            let of_tenant = match place(name, pool.places()) {
                Ok(place) => place,
                Err(refused) => {
                    of_all.give_back_unused();
                    return Err(refused);
                }
            };
            match pool.take(budget.saturating_sub(started.elapsed())).await {
                Err(ClaimError::UnknownTemplate(_)) => drained = Some(pool),
                Ok(taken) => return Ok(taken.holding([of_all, of_tenant])),
                Err(refused) => {
                    if matches!(refused, ClaimError::NoCapacity { .. }) {
                        [of_all, of_tenant].into_iter().for_each(Place::give_back_unused);
                    }
                    return Err(refused);
                }
            }
        }
        Err(self.not_served(name))
    }

    /// Why there is no pool of a template.
    fn not_served(&self, name: &TemplateName) -> ClaimError {
        let template = name.clone();
        match self.read().refused.get(name) {
            Some(reason) => ClaimError::Broken { template, reason: reason.clone() },
            None => ClaimError::UnknownTemplate(template),
        }
    }

    /// A tenant's pool, begun if it is not there; none if there is no such template.
    fn pool(&self, tenant: &Tenant, name: &TemplateName) -> Option<Pool> {
        if let Some(pool) = self.read().in_service.get(name)?.pools.get(tenant).filter(|pool| !pool.has_ended()) {
            return Some(pool.clone());
        }
        let mut templates = self.write();
        let known = templates.in_service.get_mut(name)?;
        match known.pools.get(tenant).filter(|pool| !pool.has_ended()) {
            Some(pool) => Some(pool.clone()),
            None => Some(self.begin(known, tenant)),
        }
    }

    fn begin(&self, known: &mut InService, tenant: &Tenant) -> Pool {
        let settings = self.settings(tenant, known.template.info());
        let tenancy = Tenancy { tenant: tenant.clone(), is_begun_by_claim: self.standing.as_ref() != Some(tenant) };
        let pool = Pool::start(Arc::clone(&known.template), settings, tenancy, Arc::clone(&self.shared));
        known.pools.retain(|_, pool| !pool.has_ended());
        known.pools.insert(tenant.clone(), pool.clone());
        pool
    }

    /// The template's settings, with what the tenant has set.
    fn settings(&self, tenant: &Tenant, info: &TemplateInfo) -> PoolSpec {
        let spec = &info.spec;
        let Some(patch) = self.overrides.get(tenant, &spec.name) else { return spec.pool.clone() };
        match patch.checked_on(&spec.pool, spec.memory) {
            Ok(settings) => settings,
            Err(error) => {
                let reason = in_words(error);
                tracing::warn!(template = %spec.name, %tenant, reason, "what was set of a pool is ignored: the template has changed");
                spec.pool.clone()
            }
        }
    }

    /// A tenant's pools, by template.
    pub(crate) async fn statuses(&self, tenant: &Tenant) -> Vec<PoolStatus> {
        let pools: Vec<_> =
            self.read().in_service.values().filter_map(|known| known.pools.get(tenant).cloned()).collect();
        join_all(pools.iter().map(Pool::status)).await.into_iter().flatten().collect()
    }

    /// A tenant's pool of a template, be it that it has none.
    pub(crate) async fn status(&self, tenant: &Tenant, name: &TemplateName) -> Option<PoolStatus> {
        let (template, pool) = {
            let templates = self.read();
            let known = templates.in_service.get(name)?;
            (Arc::clone(&known.template), known.pools.get(tenant).cloned())
        };
        if let Some(pool) = pool
            && let Some(status) = pool.status().await
        {
            return Some(status);
        }
        let settings = self.settings(tenant, template.info());
        Some(PoolStatus::without_vms(tenant.clone(), template.info(), settings))
    }

    /// Changes a tenant's pool, and writes that down. Blocks for as long as a small file takes to reach the disk.
    pub(crate) fn set(&self, tenant: &Tenant, name: &TemplateName, patch: &PoolPatch) -> Result<(), SetPoolError> {
        let unknown = || SetPoolError::UnknownTemplate(name.clone());
        let template = self.template(name).ok_or_else(unknown)?;
        let spec = &template.info().spec;
        let check = |patch: &PoolPatch| patch.checked_on(&spec.pool, spec.memory).map(drop).map_err(in_words);
        match self.overrides.change(tenant, name, patch, check) {
            Ok(patch) => self.pool(tenant, name).ok_or_else(unknown)?.set(patch.on(&spec.pool)),
            Err(overrides::ChangeError::Refused(reason)) => return Err(SetPoolError::Invalid(reason)),
            Err(overrides::ChangeError::Store(error)) => return Err(SetPoolError::Store(error.to_string())),
        }
        Ok(())
    }
}

/// A place for a claim, or the refusal.
fn place(name: &TemplateName, places: &Places) -> Result<Place, ClaimError> {
    places.take().map_err(|AllTaken { limit, retry_after }| {
        let error = ClaimError::Concurrency { template: name.clone(), limit, retry_after };
        metrics::claim_failed(name, &error);
        error
    })
}

/// What is wrong, without the file that it did not come from.
fn in_words(error: SpecError) -> String {
    match error {
        SpecError::OutOfBounds { field, value, bounds, .. } => format!("{field} is {value}, but must be {bounds}"),
        other => other.to_string(),
    }
}
