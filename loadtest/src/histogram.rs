//! Values of one unit, and their percentiles.

use std::time::Duration;

use crate::Row;

/// Decimal digits that are kept of each value.
const DIGITS: u8 = 4;
/// What is larger counts as this: twelve days, or a TiB.
const MOST_TICKS: u64 = 1 << 40;

/// What a figure counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// `us`
    Micros,
    /// `ms`
    Millis,
    /// `s`
    Seconds,
    /// `1/s`
    PerSecond,
    /// `MiB`
    Mebibytes,
}

impl Unit {
    /// As the report shows it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Micros => "us",
            Self::Millis => "ms",
            Self::Seconds => "s",
            Self::PerSecond => "1/s",
            Self::Mebibytes => "MiB",
        }
    }

    /// Smallest difference that is kept: one unit is so many ticks.
    const fn ticks(self) -> f64 {
        match self {
            Self::Micros | Self::Millis | Self::Seconds | Self::PerSecond => 1000.0,
            Self::Mebibytes => 1024.0,
        }
    }
}

/// Values of one unit. Percentiles are nearest-rank, to four digits: of few values, each is one that was measured.
#[derive(Debug, Clone)]
pub struct Histogram {
    unit: Unit,
    ticks: hdrhistogram::Histogram<u64>,
}

impl Histogram {
    /// Without values.
    #[must_use]
    #[allow(clippy::expect_used, reason = "both bounds are constants that it takes")]
    pub fn new(unit: Unit) -> Self {
        Self { unit, ticks: hdrhistogram::Histogram::new_with_max(MOST_TICKS, DIGITS).expect("valid bounds") }
    }

    /// Adds a time to a histogram of microseconds, milliseconds or seconds.
    pub fn record_time(&mut self, time: Duration) {
        self.record(match self.unit {
            Unit::Micros => time.as_secs_f64() * 1e6,
            Unit::Millis => time.as_secs_f64() * 1e3,
            _ => time.as_secs_f64(),
        });
    }

    /// Adds a value in the histogram's unit. What is negative or no number counts as zero.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a float's cast saturates")]
    pub fn record(&mut self, value: f64) {
        self.ticks.saturating_record((value * self.unit.ticks()).round() as u64);
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.ticks.len()
    }

    /// Without values, there are no percentiles.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ticks.is_empty()
    }

    /// The value that `quantile` (0 to 1) of all do not exceed.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> f64 {
        // Of the values that it takes for the same, the lowest: so whole numbers stay whole.
        let ticks = self.ticks.lowest_equivalent(self.ticks.value_at_quantile(quantile));
        #[allow(clippy::cast_precision_loss, reason = "at most 2^40")]
        let value = ticks as f64 / self.unit.ticks();
        (value * 1e3).round() / 1e3
    }

    /// The figure.
    #[must_use]
    pub fn row(&self, name: impl Into<String>, note: impl Into<String>) -> Row {
        Row {
            name: name.into(),
            unit: self.unit.as_str().to_owned(),
            n: self.len(),
            p50: self.quantile(0.50),
            p95: self.quantile(0.95),
            p99: self.quantile(0.99),
            note: note.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let mut histogram = Histogram::new(Unit::PerSecond);
        for value in (1..=100).rev() {
            histogram.record(f64::from(value));
        }
        let row = histogram.row("x", "why");
        assert_eq!((row.n, row.p50, row.p95, row.p99), (100, 50.0, 95.0, 99.0));
        assert_eq!((row.unit.as_str(), row.note.as_str()), ("1/s", "why"));
    }

    #[test]
    fn a_single_value_is_every_percentile() {
        let mut histogram = Histogram::new(Unit::Millis);
        histogram.record_time(Duration::from_micros(1234));
        assert_eq!([0.5, 0.95, 0.99].map(|q| histogram.quantile(q)), [1.234; 3]);
    }

    #[test]
    fn units_are_kept_apart() {
        let mut seconds = Histogram::new(Unit::Seconds);
        seconds.record_time(Duration::from_millis(1500));
        assert_eq!(seconds.quantile(0.5), 1.5);
        let mut memory = Histogram::new(Unit::Mebibytes);
        memory.record(1.25);
        assert_eq!(memory.quantile(0.5), 1.25);
    }

    #[test]
    fn zero_counts_and_nonsense_is_zero() {
        let mut histogram = Histogram::new(Unit::Millis);
        assert!(histogram.is_empty());
        for value in [0.0, -1.0, f64::NAN] {
            histogram.record(value);
        }
        assert_eq!((histogram.len(), histogram.quantile(0.99)), (3, 0.0));
    }

    #[test]
    fn an_hour_keeps_four_digits() {
        let mut histogram = Histogram::new(Unit::Millis);
        histogram.record_time(Duration::from_secs(3600));
        let off = histogram.quantile(0.5) / 3_600_000.0 - 1.0;
        assert!(off.abs() < 1e-4, "{off}");
    }
}
