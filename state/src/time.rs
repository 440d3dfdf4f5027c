//! Points in time as records hold them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// A wall clock's time in whole milliseconds since the Unix epoch: it means the same after a restart and on another node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(u64);

impl Timestamp {
    /// Milliseconds since the Unix epoch. Held below 2⁶³, so that every store can keep it as a signed number.
    #[must_use]
    pub const fn from_ms(ms: u64) -> Self {
        Self(if ms > i64::MAX as u64 { i64::MAX as u64 } else { ms })
    }

    /// Milliseconds since the Unix epoch.
    #[must_use]
    pub const fn as_ms(self) -> u64 {
        self.0
    }

    /// This machine's wall clock; the epoch if it stands before that.
    #[must_use]
    pub fn now() -> Self {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(Self(0), |since| Self(0).plus(since))
    }

    /// Later by that much.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Self {
        Self::from_ms(self.0.saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
    }

    /// How much later it is than `earlier`; zero if it is not.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

/// Durations in serialised form: whole milliseconds.
pub(crate) mod ms {
    use std::time::Duration;

    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(duration: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_millis)
    }

    /// The same for a duration that may be missing.
    pub(crate) mod option {
        use std::time::Duration;

        use serde::{Deserialize as _, Deserializer, Serializer};

        pub(crate) fn serialize<S: Serializer>(duration: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
            match duration {
                Some(duration) => super::serialize(duration, to),
                None => to.serialize_none(),
            }
        }

        pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
            Option::<u64>::deserialize(from).map(|ms| ms.map(Duration::from_millis))
        }
    }
}
