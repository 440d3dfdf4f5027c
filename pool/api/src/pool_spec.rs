//! The settings of a pool: `[pool]` of a `template.toml`, and what a running node is told to change of them.

mod window;

use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};

pub use self::window::{Day, NotATime, NotAWindow, TimeOfDay, Window};
use crate::{
    spec::{SpecError, whole_mib},
    units,
};

/// Most VMs of a pool, and most requests at once: far more than a node has memory for.
const MOST: u32 = 1000;
const CONCURRENCY: &str = "1 to 100000; leave it out for no limit";
/// Longest idle time that may be asked for.
const LONGEST_IDLE: Duration = Duration::from_secs(30 * 24 * 3600);

/// How many VMs a template keeps ready, for each tenant who uses it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolSpec {
    /// VMs kept ready, hot ones included. A schedule window that is open has its own.
    #[serde(default = "defaults::min", deserialize_with = "read::up_to_max")]
    pub min: u32,
    /// Most VMs at once, whatever they do; further claims wait for one to end.
    #[serde(default = "defaults::max", deserialize_with = "read::from_one")]
    pub max: u32,
    /// How many of the ready VMs run already and have proved their repair.
    #[serde(default, deserialize_with = "read::up_to_max")]
    pub hot: u32,
    /// VMs kept ready while at least one is claimed, where that is more than `min`.
    #[serde(default, deserialize_with = "read::up_to_max")]
    pub buffer: u32,
    /// Most memory that its VMs may be promised together. None: as much as `max` VMs need.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "some_whole_mib",
        deserialize_with = "units::some_size"
    )]
    pub max_memory: Option<ByteSize>,
    /// After so long without a claim it keeps no VM ready, unless a window of the schedule is open. Zero: never. None: never for the default
    /// tenant, [`TENANT_IDLE`](Self::TENANT_IDLE) for others.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "units::some_time")]
    pub scale_to_zero_after: Option<Duration>,
    /// Its share of the node's restores, beside those of other pools that want some at the same time.
    #[serde(default = "defaults::weight", deserialize_with = "read::from_one")]
    pub weight: u32,
    /// Most claims at once, over all tenants: those that wait and those that have a VM. Further ones are refused at once. None: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "read::concurrency")]
    pub concurrency: Option<u32>,
    /// Times of the week at which it has another `min`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub schedule: Vec<Window>,
}

impl Default for PoolSpec {
    fn default() -> Self {
        Self {
            min: defaults::min(),
            max: defaults::max(),
            hot: 0,
            buffer: 0,
            max_memory: None,
            scale_to_zero_after: None,
            weight: defaults::weight(),
            concurrency: None,
            schedule: Vec::new(),
        }
    }
}

#[expect(clippy::ref_option, reason = "serde's signature")]
fn some_whole_mib<S: serde::Serializer>(size: &Option<ByteSize>, to: S) -> Result<S::Ok, S::Error> {
    match size {
        Some(size) => whole_mib(size, to),
        None => to.serialize_none(),
    }
}

mod read {
    use serde::Deserializer;

    use super::{CONCURRENCY, units::number};

    pub(super) fn up_to_max<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
        number(from, "0 to 1000, and at most pool.max")
    }
    pub(super) fn from_one<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
        number(from, "1 to 1000")
    }
    pub(super) fn concurrency<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
        number(from, CONCURRENCY).map(Some)
    }
}

mod defaults {
    pub(super) const fn min() -> u32 {
        4
    }
    pub(super) const fn max() -> u32 {
        32
    }
    pub(super) const fn weight() -> u32 {
        100
    }
}

impl PoolSpec {
    /// How long the pool of a tenant other than the default one may be idle, if its template says nothing. Chosen, not measured: as long as
    /// a suspended sandbox keeps its memory.
    pub const TENANT_IDLE: Duration = Duration::from_secs(600);

    /// Checks all bounds, for VMs with `memory` each.
    ///
    /// # Errors
    /// [`SpecError::OutOfBounds`], for the first field that is.
    pub fn check(&self, memory: ByteSize) -> Result<(), SpecError> {
        let (max, mib) = (self.max, 1 << 20);
        let up_to_max = format!("0 to 1000, and at most pool.max, which is {max}");
        let window = |valid: fn(&Window) -> bool| self.schedule.iter().find(|window| !valid(window));
        let bounded = [
            ("pool.max", max.to_string(), "1 to 1000".to_owned(), (1..=MOST).contains(&max)),
            ("pool.min", self.min.to_string(), up_to_max.clone(), self.min <= max),
            ("pool.hot", self.hot.to_string(), up_to_max.clone(), self.hot <= max),
            ("pool.buffer", self.buffer.to_string(), up_to_max, self.buffer <= max),
            ("pool.weight", self.weight.to_string(), "1 to 1000".into(), (1..=MOST).contains(&self.weight)),
            (
                "pool.concurrency",
                self.concurrency.unwrap_or_default().to_string(),
                CONCURRENCY.into(),
                self.concurrency.is_none_or(|limit| (1..=100_000).contains(&limit)),
            ),
            (
                "pool.max_memory",
                self.max_memory.unwrap_or_default().to_string(),
                format!("in whole MiB, and enough for one VM, which has {memory}"),
                self.max_memory.is_none_or(|most| most >= memory && most.as_u64().is_multiple_of(mib)),
            ),
            (
                "pool.scale_to_zero_after",
                format!("{:?}", self.scale_to_zero_after.unwrap_or_default()),
                "1s to 30days, or 0s for never".into(),
                self.scale_to_zero_after
                    .is_none_or(|idle| idle.is_zero() || (Duration::from_secs(1)..=LONGEST_IDLE).contains(&idle)),
            ),
            (
                "pool.schedule.days",
                "empty".into(),
                "at least one of mon, tue, wed, thu, fri, sat, sun".into(),
                window(|window| !window.days.is_empty()).is_none(),
            ),
            (
                "pool.schedule.to",
                window(|window| window.from != window.to).map(|window| window.to.to_string()).unwrap_or_default(),
                "another time than pool.schedule.from; an earlier one is on the day after".into(),
                window(|window| window.from != window.to).is_none(),
            ),
            (
                "pool.schedule.min",
                self.most_scheduled().to_string(),
                format!("at most pool.max, which is {max}"),
                self.most_scheduled() <= max,
            ),
        ];
        match bounded.into_iter().find(|(.., valid)| !valid) {
            Some((field, value, bounds, _)) => Err(SpecError::OutOfBounds { field, value, bounds, line: None }),
            None => Ok(()),
        }
    }

    fn most_scheduled(&self) -> u32 {
        self.schedule.iter().map(|window| window.min).max().unwrap_or_default()
    }
}

/// What to change of a pool's settings; what is not given stays.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolPatch {
    /// See [`PoolSpec::min`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<u32>,
    /// See [`PoolSpec::max`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
    /// See [`PoolSpec::hot`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hot: Option<u32>,
    /// See [`PoolSpec::buffer`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buffer: Option<u32>,
    /// See [`PoolSpec::weight`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// See [`PoolSpec::max_memory`]. Zero takes the limit away.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "some_whole_mib",
        deserialize_with = "units::some_size"
    )]
    pub max_memory: Option<ByteSize>,
    /// See [`PoolSpec::scale_to_zero_after`].
    #[serde(default, skip_serializing_if = "Option::is_none", with = "units::some_time")]
    pub scale_to_zero_after: Option<Duration>,
    /// Most claims of the tenant at once, beside the template's own limit, which is for all tenants together and cannot be exceeded. Zero takes
    /// it away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<u32>,
    /// See [`PoolSpec::schedule`]. All windows; an empty list takes them away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Vec<Window>>,
}

impl PoolPatch {
    /// The settings with the changes made, for VMs with `memory` each.
    ///
    /// # Errors
    /// [`SpecError::OutOfBounds`] if they would be impossible.
    pub fn checked_on(&self, spec: &PoolSpec, memory: ByteSize) -> Result<PoolSpec, SpecError> {
        let settings = self.on(spec);
        settings.check(memory)?;
        match (self.concurrency, spec.concurrency) {
            (Some(own), Some(all)) if own > all => Err(SpecError::OutOfBounds {
                field: "pool.concurrency",
                value: own.to_string(),
                bounds: format!(
                    "1 to {all}, which the template allows for all tenants together, or 0 for no other limit"
                ),
                line: None,
            }),
            _ => Ok(settings),
        }
    }

    /// The settings with the changes made. They are not checked.
    #[must_use]
    pub fn on(&self, spec: &PoolSpec) -> PoolSpec {
        PoolSpec {
            min: self.min.unwrap_or(spec.min),
            max: self.max.unwrap_or(spec.max),
            hot: self.hot.unwrap_or(spec.hot),
            buffer: self.buffer.unwrap_or(spec.buffer),
            weight: self.weight.unwrap_or(spec.weight),
            max_memory: self.max_memory.or(spec.max_memory).filter(|most| most.as_u64() > 0),
            scale_to_zero_after: self.scale_to_zero_after.or(spec.scale_to_zero_after),
            concurrency: self.concurrency.filter(|own| *own > 0).or(spec.concurrency),
            schedule: self.schedule.as_ref().unwrap_or(&spec.schedule).clone(),
        }
    }

    /// This one, and then `later`, in one.
    #[must_use]
    pub fn then(&self, later: &Self) -> Self {
        Self {
            min: later.min.or(self.min),
            max: later.max.or(self.max),
            hot: later.hot.or(self.hot),
            buffer: later.buffer.or(self.buffer),
            weight: later.weight.or(self.weight),
            max_memory: later.max_memory.or(self.max_memory),
            scale_to_zero_after: later.scale_to_zero_after.or(self.scale_to_zero_after),
            concurrency: later.concurrency.or(self.concurrency),
            schedule: later.schedule.as_ref().or(self.schedule.as_ref()).cloned(),
        }
    }
}

#[cfg(test)]
mod tests;
