//! Numbers, sizes and times as people write them: what cannot be read is refused with what could be.

use std::{fmt, marker::PhantomData, time::Duration};

use bytesize::ByteSize;
use serde::{
    Deserialize, Deserializer,
    de::{Error, Unexpected, Visitor},
};

const SIZE: &str = "a size with its unit, such as 64MiB or 2GiB";
const TIME: &str = "a time with its unit, such as 500ms, 5s, 2m or 1h";

/// Reads a whole number; `expected` says which ones are allowed.
pub(crate) fn number<'de, D, T>(from: D, expected: &'static str) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: TryFrom<i64> + TryFrom<u64>,
{
    from.deserialize_u64(Number(expected, PhantomData))
}

struct Number<T>(&'static str, PhantomData<T>);

impl<T: TryFrom<i64> + TryFrom<u64>> Visitor<'_> for Number<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a whole number, {}", self.0)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        T::try_from(number).map_err(|_| E::invalid_value(Unexpected::Signed(number), &self))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        T::try_from(number).map_err(|_| E::invalid_value(Unexpected::Unsigned(number), &self))
    }
}

/// A size in bytes.
struct Size(ByteSize);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Read;
        impl Visitor<'_> for Read {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(SIZE)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Size, E> {
                text.parse().map(Size).map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
            }

            // Bytes.
            fn visit_i64<E: Error>(self, number: i64) -> Result<Size, E> {
                let bytes = u64::try_from(number).map_err(|_| E::invalid_value(Unexpected::Signed(number), &self))?;
                self.visit_u64(bytes)
            }

            fn visit_u64<E: Error>(self, bytes: u64) -> Result<Size, E> {
                Ok(Size(ByteSize::b(bytes)))
            }
        }
        from.deserialize_any(Read)
    }
}

/// A duration.
struct Time(Duration);

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Read;
        impl Visitor<'_> for Read {
            type Value = Time;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(TIME)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Time, E> {
                humantime::parse_duration(text).map(Time).map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
            }
        }
        from.deserialize_str(Read)
    }
}

/// Reads a size.
pub(crate) fn size<'de, D: Deserializer<'de>>(from: D) -> Result<ByteSize, D::Error> {
    Size::deserialize(from).map(|size| size.0)
}

/// Reads a size that may be left out.
pub(crate) fn some_size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<ByteSize>, D::Error> {
    Ok(Option::<Size>::deserialize(from)?.map(|size| size.0))
}

/// Times, written as `humantime` does.
pub(crate) mod time {
    use super::{Deserialize as _, Deserializer, Duration, Time};

    pub(crate) use humantime_serde::serialize;

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        Time::deserialize(from).map(|time| time.0)
    }
}

/// Times that may be left out.
pub(crate) mod some_time {
    use super::{Deserialize as _, Deserializer, Duration, Time};

    pub(crate) use humantime_serde::serialize;

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<Time>::deserialize(from)?.map(|time| time.0))
    }
}
