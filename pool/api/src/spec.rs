//! `template.toml`: parsed into a checked form, or refused with what to change.

use std::{collections::BTreeMap, time::Duration};

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::{PoolSpec, TemplateName, units};

/// Why a `template.toml` is refused.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// Not TOML, or a field that does not exist, is missing, or is of the wrong type.
    #[error("template.toml is not valid: {0}")]
    Toml(String),
    /// The name breaks the rule.
    #[error("template name {0:?} is not 1 to 63 lower-case letters, digits and inner hyphens")]
    Name(String),
    /// A field is outside its bounds.
    #[error("{}{field} is {value}, but must be {bounds}", place(*line))]
    OutOfBounds {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        bounds: String,
        /// Where it is in `template.toml`; none if it is not there, and a default is what is outside, or it came by another way.
        line: Option<usize>,
    },
}

/// What a template is made of: the checked content of its `template.toml`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateSpec {
    /// Its name.
    pub name: TemplateName,
    /// The root file system that it starts from.
    #[serde(default = "defaults::base")]
    pub base: String,
    /// Shell command that starts the function in `/app`, where the template's folder is.
    pub command: String,
    /// TCP port on which the function listens, also given to it as `PORT`.
    #[serde(default = "defaults::port", deserialize_with = "read::port")]
    pub port: u16,
    /// Path whose `GET` answers below 500 once the function is ready; without one, an open port suffices.
    #[serde(default)]
    pub ready: Option<String>,
    /// How long the function may take to become ready.
    #[serde(default = "defaults::ready_timeout", with = "units::time")]
    pub ready_timeout: Duration,
    /// Number of vCPUs.
    #[serde(default = "defaults::cpu", deserialize_with = "read::cpu")]
    pub cpu: u8,
    /// Guest memory.
    #[serde(default = "defaults::memory", serialize_with = "whole_mib", deserialize_with = "units::size")]
    pub memory: ByteSize,
    /// Size of the root file system's disk; raised to the base's size where that is larger.
    #[serde(default = "defaults::disk", serialize_with = "whole_mib", deserialize_with = "units::size")]
    pub disk: ByteSize,
    /// Longest time an invocation may take until the function's answer begins.
    #[serde(default = "defaults::timeout", with = "units::time")]
    pub timeout: Duration,
    /// Environment of the function.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Its pool.
    #[serde(default)]
    pub pool: PoolSpec,
    /// Its snapshot.
    #[serde(default)]
    pub snapshot: SnapshotSpec,
    /// Devices that not every template needs.
    #[serde(default)]
    pub devices: DevicesSpec,
}

/// Devices beside disks and vsock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DevicesSpec {
    /// A virtio source of random bytes, the guest's `/dev/hwrng`. Its own generator is seeded without one.
    #[serde(default)]
    pub rng: bool,
    /// A virtio balloon with free page reporting: memory that the guest frees is given back to the host while it runs.
    #[serde(default)]
    pub balloon: bool,
}

/// How a template's snapshot is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotSpec {
    /// Its memory.
    #[serde(default)]
    pub memory: MemoryForm,
}

/// How the memory of a snapshot is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryForm {
    /// As it is: VMs map the file, and the kernel alone fills their memory.
    #[default]
    Raw,
    /// In compressed frames: a pager fills the memory of VMs, and reads what they touch.
    Compressed,
}

/// Sizes as they are: `ByteSize`'s own form is rounded for people, and would come back as another size.
pub(crate) fn whole_mib<S: serde::Serializer>(size: &ByteSize, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{}MiB", size.as_u64() >> 20))
}

const PORTS: &str = "1 to 65535";
const CPUS: &str = "1 to 32";

mod read {
    use serde::Deserializer;

    use super::{CPUS, PORTS, units::number};

    pub(super) fn port<'de, D: Deserializer<'de>>(from: D) -> Result<u16, D::Error> {
        number(from, PORTS)
    }
    pub(super) fn cpu<'de, D: Deserializer<'de>>(from: D) -> Result<u8, D::Error> {
        number(from, CPUS)
    }
}

mod defaults {
    use super::{ByteSize, Duration};

    pub(super) fn base() -> String {
        "debian".into()
    }
    pub(super) const fn port() -> u16 {
        8080
    }
    pub(super) const fn ready_timeout() -> Duration {
        Duration::from_secs(120)
    }
    pub(super) const fn cpu() -> u8 {
        1
    }
    pub(super) const fn memory() -> ByteSize {
        ByteSize::mib(256)
    }
    pub(super) const fn disk() -> ByteSize {
        ByteSize::gib(2)
    }
    pub(super) const fn timeout() -> Duration {
        Duration::from_secs(60)
    }
}

impl TemplateSpec {
    /// Parses and checks a `template.toml`.
    ///
    /// # Errors
    /// [`SpecError`], which says what to change.
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        let spec: Self = toml::from_str(text).map_err(|error| SpecError::Toml(error.to_string().trim().to_owned()))?;
        match spec.check() {
            Err(SpecError::OutOfBounds { field, value, bounds, .. }) => {
                Err(SpecError::OutOfBounds { field, value, bounds, line: line_of(text, field) })
            }
            checked => checked.map(|()| spec),
        }
    }

    /// Guest memory in MiB.
    #[must_use]
    pub fn memory_mib(&self) -> u32 {
        u32::try_from(self.memory.as_u64() >> 20).unwrap_or(u32::MAX)
    }

    fn check(&self) -> Result<(), SpecError> {
        let mib = 1 << 20;
        let memory = self.memory.as_u64();
        let bounded = [
            ("command", self.command.clone(), "1 to 4096 bytes without NUL", {
                (1..=4096).contains(&self.command.trim().len()) && !self.command.contains('\0')
            }),
            ("base", self.base.clone(), "a plain name", self.base.parse::<TemplateName>().is_ok()),
            ("port", self.port.to_string(), PORTS, self.port > 0),
            ("ready", self.ready.clone().unwrap_or_default(), "a path that begins with / and has no spaces", {
                self.ready
                    .as_ref()
                    .is_none_or(|path| path.starts_with('/') && path.chars().all(|c| c.is_ascii_graphic()))
            }),
            ("ready_timeout", format!("{:?}", self.ready_timeout), "1s to 1h", in_seconds(self.ready_timeout, 1, 3600)),
            ("timeout", format!("{:?}", self.timeout), "1s to 1h", in_seconds(self.timeout, 1, 3600)),
            ("cpu", self.cpu.to_string(), CPUS, (1..=32).contains(&self.cpu)),
            ("memory", self.memory.to_string(), "64MiB to 3GiB, in whole MiB", {
                (64 * mib..=3072 * mib).contains(&memory) && memory.is_multiple_of(mib)
            }),
            ("disk", self.disk.to_string(), "64MiB to 1TiB, in whole MiB", {
                (64 * mib..=(mib << 20)).contains(&self.disk.as_u64()) && self.disk.as_u64().is_multiple_of(mib)
            }),
            ("devices.balloon", "true".into(), "false where snapshot.memory is \"compressed\"", {
                !(self.devices.balloon && self.snapshot.memory == MemoryForm::Compressed)
            }),
            ("env.PORT", "set".into(), "left out: the function's PORT is `port`", !self.env.contains_key("PORT")),
            ("env", "a name or value".into(), "names of letters, digits and _ and values without NUL", {
                self.env.iter().all(|(name, value)| {
                    !name.is_empty()
                        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
                        && !value.contains('\0')
                })
            }),
        ];
        match bounded.into_iter().find(|(.., valid)| !valid) {
            Some((field, value, bounds, _)) => {
                Err(SpecError::OutOfBounds { field, value, bounds: bounds.to_owned(), line: None })
            }
            None => self.pool.check(self.memory),
        }
    }
}

fn place(line: Option<usize>) -> String {
    line.map_or_else(|| "template.toml: ".into(), |line| format!("template.toml, line {line}: "))
}

/// The line on which a field stands, such as `pool.max`; of a field of tables of which there are several, that in the last.
fn line_of(text: &str, field: &str) -> Option<usize> {
    let root = DeTable::parse(text).ok()?;
    let (mut table, mut place) = (root.get_ref(), None);
    for part in field.split('.') {
        let (key, value) = table.get_key_value(part)?;
        place = Some(key.span().start);
        table = match value.get_ref() {
            DeValue::Table(inner) => inner,
            DeValue::Array(all) => match all.iter().last().map(Spanned::get_ref) {
                Some(DeValue::Table(inner)) => inner,
                _ => continue,
            },
            _ => continue,
        };
    }
    Some(1 + text.get(..place?)?.matches('\n').count())
}

fn in_seconds(duration: Duration, least: u64, most: u64) -> bool {
    (Duration::from_secs(least)..=Duration::from_secs(most)).contains(&duration)
}

#[cfg(test)]
mod tests;
