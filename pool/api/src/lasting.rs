//! How long something of a sandbox may last: its timeout, its idle time, its time in RAM, a hold.

use std::time::Duration;

use crate::SandboxError;

/// Times of records are whole milliseconds: nothing shorter can be told from nothing.
const SHORTEST: Duration = Duration::from_millis(1);
/// Chosen: longer than any host runs, and far from where sums of times end.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Whether `what` may last so long.
///
/// # Errors
/// [`SandboxError::Invalid`], with the bounds.
pub fn lasting(what: &str, duration: Duration) -> Result<(), SandboxError> {
    bounded(what, duration, "1ms to 365days")
}

/// The same for what `0s` switches off.
///
/// # Errors
/// [`SandboxError::Invalid`], with the bounds.
pub fn lasting_or_off(what: &str, duration: Duration) -> Result<(), SandboxError> {
    if duration.is_zero() { Ok(()) } else { bounded(what, duration, "1ms to 365days, or 0s for never") }
}

fn bounded(what: &str, duration: Duration, bounds: &str) -> Result<(), SandboxError> {
    if (SHORTEST..=LONGEST).contains(&duration) {
        return Ok(());
    }
    Err(SandboxError::Invalid { reason: format!("{what} is {duration:?}, but must be {bounds}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_out_of_bounds_is_named_with_them() {
        let day = Duration::from_secs(24 * 3600);
        for (good, off) in [(SHORTEST, false), (365 * day, false), (Duration::ZERO, true)] {
            assert!(lasting_or_off("idle", good).is_ok(), "{good:?}");
            assert_eq!(lasting("timeout", good).is_err(), off, "{good:?}");
        }
        for bad in [Duration::from_nanos(1), Duration::from_micros(999), 365 * day + SHORTEST] {
            let reason = lasting("timeout", bad).unwrap_err().to_string();
            assert_eq!(reason, format!("timeout is {bad:?}, but must be 1ms to 365days"));
            let reason = lasting_or_off("idle", bad).unwrap_err().to_string();
            assert_eq!(reason, format!("idle is {bad:?}, but must be 1ms to 365days, or 0s for never"));
        }
    }
}
