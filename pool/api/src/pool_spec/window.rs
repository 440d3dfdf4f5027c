//! Times of the week at which a pool keeps other numbers ready.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A time of the week, in UTC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// The days on which it begins.
    pub days: Vec<Day>,
    /// When it begins.
    pub from: TimeOfDay,
    /// When it ends; on the day after, if that is earlier than `from`.
    pub to: TimeOfDay,
    /// VMs kept ready meanwhile. Where windows overlap, the largest counts.
    #[serde(deserialize_with = "super::read::up_to_max")]
    pub min: u32,
}

/// A day of the week.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "they are what they are called")]
pub enum Day {
    Mon,
    Tue,
    Wed,
    Thu,
    Fri,
    Sat,
    Sun,
}

/// A time of day in UTC, written `08:30`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TimeOfDay {
    /// Minutes since midnight.
    minutes: u16,
}

/// Not a time of day.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a time of day in UTC, 00:00 to 23:59")]
pub struct NotATime(String);

impl TimeOfDay {
    /// Minutes since midnight.
    #[must_use]
    pub const fn minutes(self) -> u16 {
        self.minutes
    }
}

impl FromStr for TimeOfDay {
    type Err = NotATime;

    fn from_str(text: &str) -> Result<Self, NotATime> {
        let two = |part: &str| {
            part.parse::<u16>().ok().filter(|_| part.len() == 2 && part.bytes().all(|byte| byte.is_ascii_digit()))
        };
        let parsed = text.split_once(':').and_then(|(hour, minute)| Some((two(hour)?, two(minute)?)));
        match parsed {
            Some((hour @ 0..24, minute @ 0..60)) => Ok(Self { minutes: hour * 60 + minute }),
            _ => Err(NotATime(text.chars().take(20).collect())),
        }
    }
}

impl TryFrom<String> for TimeOfDay {
    type Error = NotATime;

    fn try_from(text: String) -> Result<Self, NotATime> {
        text.parse()
    }
}

impl From<TimeOfDay> for String {
    fn from(time: TimeOfDay) -> Self {
        time.to_string()
    }
}

impl fmt::Display for TimeOfDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02}:{:02}", self.minutes / 60, self.minutes % 60)
    }
}

/// Not a window in one word.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not DAYS/FROM-TO/MIN, such as mon,tue,wed/08:00-18:00/5: {reason}")]
pub struct NotAWindow {
    text: String,
    reason: String,
}

/// In one word, as [`Window`]'s [`Display`](fmt::Display) writes it: `mon,tue/08:00-18:00/5`.
impl FromStr for Window {
    type Err = NotAWindow;

    fn from_str(text: &str) -> Result<Self, NotAWindow> {
        let refused = |reason: String| NotAWindow { text: text.chars().take(80).collect(), reason };
        let mut parts = text.split('/');
        let (Some(days), Some(times), Some(min), None) = (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(refused("it has not three parts".into()));
        };
        let day = |day: &str| {
            Day::ALL.into_iter().find(|known| known.as_str() == day).ok_or_else(|| {
                refused(format!("{day:?} is not a day, one of {}", Day::ALL.map(Day::as_str).join(", ")))
            })
        };
        let (from, to) = times.split_once('-').ok_or_else(|| refused(format!("{times:?} is not FROM-TO")))?;
        let time = |time: &str| time.parse().map_err(|error: NotATime| refused(error.to_string()));
        Ok(Self {
            days: days.split(',').map(day).collect::<Result<_, _>>()?,
            from: time(from)?,
            to: time(to)?,
            min: min.parse().map_err(|_| refused(format!("{min:?} is not a number of VMs")))?,
        })
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let days: Vec<_> = self.days.iter().map(|day| day.as_str()).collect();
        write!(f, "{}/{}-{}/{}", days.join(","), self.from, self.to, self.min)
    }
}

impl Day {
    /// The week.
    pub const ALL: [Self; 7] = [Self::Mon, Self::Tue, Self::Wed, Self::Thu, Self::Fri, Self::Sat, Self::Sun];

    /// As files and commands have it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Mon => "mon",
            Self::Tue => "tue",
            Self::Wed => "wed",
            Self::Thu => "thu",
            Self::Fri => "fri",
            Self::Sat => "sat",
            Self::Sun => "sun",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_one_word() {
        let window: Window = "mon,fri/08:00-18:30/5".parse().unwrap();
        assert_eq!((&window.days[..], window.min), (&[Day::Mon, Day::Fri][..], 5));
        assert_eq!((window.from.minutes(), window.to.minutes()), (480, 18 * 60 + 30));
        assert_eq!(window.to_string(), "mon,fri/08:00-18:30/5");
        for day in Day::ALL {
            assert_eq!(serde_json::to_value(day).unwrap(), day.as_str());
        }
        for (bad, why) in [
            ("monday/08:00-09:00/1", "one of mon, tue, wed, thu, fri, sat, sun"),
            ("mon/8:00-09:00/1", "00:00 to 23:59"),
            ("mon/08:00/1", "is not FROM-TO"),
            ("mon/08:00-09:00/many", "number of VMs"),
            ("mon 08:00-09:00 1", "three parts"),
            ("mon/08:00-09:00/1/2", "three parts"),
            ("", "DAYS/FROM-TO/MIN"),
        ] {
            let refused = bad.parse::<Window>().unwrap_err().to_string();
            assert!(refused.contains(why), "{bad}: {refused}");
        }
    }
}
