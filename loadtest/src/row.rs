//! A figure with its spread, and many of them as a table.

use serde::{Deserialize, Serialize};

/// One line of a report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// What was measured; no two rows of a report have the same.
    pub name: String,
    /// What the percentiles count.
    pub unit: String,
    /// Number of measurements.
    pub n: u64,
    /// The median.
    pub p50: f64,
    /// 95 in 100 are not above it.
    pub p95: f64,
    /// 99 in 100 are not above it.
    pub p99: f64,
    /// How it was measured, and what one should know to judge it.
    pub note: String,
}

/// Rows as a table for people, under a head.
#[must_use]
pub fn table(rows: &[Row]) -> String {
    let head = ["NAME", "UNIT", "N", "P50", "P95", "P99", "NOTE"].map(str::to_owned);
    let cells = rows.iter().map(|row| {
        let [p50, p95, p99] = [row.p50, row.p95, row.p99].map(|value| format!("{value:.3}"));
        [row.name.clone(), row.unit.clone(), row.n.to_string(), p50, p95, p99, row.note.clone()]
    });
    let lines: Vec<_> = std::iter::once(head).chain(cells).collect();
    let widths: [usize; 7] =
        std::array::from_fn(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or_default());
    let mut text = String::new();
    for line in &lines {
        for (column, (cell, width)) in line.iter().zip(widths).enumerate() {
            match column {
                0 | 1 => text.push_str(&format!("{cell:<width$}  ")),
                6 => text.push_str(cell),
                _ => text.push_str(&format!("{cell:>width$}  ")),
            }
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_left_numbers_right_notes_last() {
        let row = |name: &str, p50, note: &str| Row {
            name: name.into(),
            unit: "ms".into(),
            n: 7,
            p50,
            p95: 2.0,
            p99: 3.0,
            note: note.into(),
        };
        let table = table(&[row("a", 1.5, "why"), row("longer", 1234.5678, "")]);
        let wanted = "NAME    UNIT  N       P50    P95    P99  NOTE\n\
                      a       ms    7     1.500  2.000  3.000  why\n\
                      longer  ms    7  1234.568  2.000  3.000\n";
        assert_eq!(table, wanted);
    }
}
