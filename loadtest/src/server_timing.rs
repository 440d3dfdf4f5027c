//! The `Server-Timing` header (W3C Server Timing): `name;dur=1.5;desc="text", …`, in milliseconds.

use std::time::Duration;

/// The phases of one answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerTiming {
    phases: Vec<(String, Duration)>,
}

impl ServerTiming {
    /// Reads the header's values, in their order. What has no time, or none that is one, is left out.
    pub fn parse<'a>(values: impl IntoIterator<Item = &'a str>) -> Self {
        let phases = values.into_iter().flat_map(|value| split(value, ',')).filter_map(|metric| {
            let mut parts = split(metric, ';').map(str::trim);
            let name = parts.next().filter(|name| !name.is_empty())?;
            let parameters = parts.filter_map(|part| part.split_once('='));
            let mut times = parameters.filter(|(key, _)| key.trim().eq_ignore_ascii_case("dur"));
            let millis: f64 = times.next()?.1.trim().trim_matches('"').parse().ok()?;
            Some((name.to_owned(), Duration::try_from_secs_f64(millis / 1e3).ok()?))
        });
        Self { phases: phases.collect() }
    }

    /// The time of a phase. Of several with this name it is the last: the gateway writes its own behind the function's.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Duration> {
        self.phases.iter().rev().find(|(phase, _)| phase == name).map(|(_, time)| *time)
    }
}

/// Splits at `separator`, but not within quotes.
fn split(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let (mut quoted, mut escaped) = (false, false);
    text.split(move |c| {
        let literal = std::mem::take(&mut escaped);
        match c {
            '"' if !literal => quoted = !quoted,
            '\\' if quoted && !literal => escaped = true,
            _ => {}
        }
        c == separator && !quoted
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn micros(timing: &ServerTiming, name: &str) -> Option<u128> {
        timing.get(name).map(|time| time.as_micros())
    }

    #[test]
    fn what_the_gateway_writes_is_read() {
        let timing = ServerTiming::parse(["queue;dur=0.073, claim;dur=4.749, restore;dur=0.000, repair;dur=461.141"]);
        assert_eq!(micros(&timing, "queue"), Some(73));
        assert_eq!(micros(&timing, "claim"), Some(4749));
        assert_eq!(micros(&timing, "restore"), Some(0));
        assert_eq!(micros(&timing, "repair"), Some(461_141));
        assert_eq!(micros(&timing, "guest"), None);
    }

    #[test]
    fn the_gateway_s_word_is_the_last() {
        let timing = ServerTiming::parse(["db;dur=3, claim;dur=999", "claim;dur=1"]);
        assert_eq!(micros(&timing, "claim"), Some(1000));
        assert_eq!(micros(&timing, "db"), Some(3000));
    }

    #[test]
    fn quotes_spaces_and_other_parameters() {
        let timing = ServerTiming::parse([r#"a; desc="x, b;dur=9 \" ,c;dur=8" ; DUR = 2 ,d;dur="5""#]);
        assert_eq!(micros(&timing, "a"), Some(2000));
        assert_eq!(micros(&timing, "d"), Some(5000));
        assert_eq!((timing.get("b"), timing.get("c")), (None, None));
    }

    #[test]
    fn nonsense_is_left_out() {
        for value in ["", ",", ";dur=1", "a", "a;dur", "a;dur=", "a;dur=x", "a;dur=-1", "a;dur=NaN", "a;dur=inf", "\""]
        {
            assert_eq!(ServerTiming::parse([value]), ServerTiming::default(), "{value}");
        }
        assert_eq!(micros(&ServerTiming::parse(["a;dur=x, ,b;dur=1"]), "b"), Some(1000));
    }
}
