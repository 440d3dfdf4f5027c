//! `stasis bench vmm`: what the VMM adds to the bare limit, measured with a guest that runs at full speed on any KVM.
//!
//! ```text
//! flat guest ─boot, snapshot─▶ image, state ─▶ figure ─▶ figure ─▶ …
//! ```
//!
//! A [`Figure`] is what is measured together, one row or several; it depends on no other.

mod births;
mod claims;
mod figure;
mod guest;
mod linux;
mod live;
mod lives;
mod paged;
mod rewind;
mod sleep;

use std::{cell::OnceCell, path::PathBuf};

use anyhow::{Context as _, bail};
use stasis_loadtest::Row;
use stasis_vmm_api::Request;

use self::{
    births::{Births, Vmm},
    figure::Figure,
    guest::{Guest, Snapshot},
};

/// What to measure, and where the figures go.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct VmmBench {
    /// Add the figures to this report, a JSON list; those of the same names are replaced
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// Measure only these rows: a row's name, or what several names begin with before a dot (`rewind_us`); may be given several times
    #[arg(long, value_name = "PATTERN")]
    only: Vec<String>,
    /// Folder of a published template (`DATA/data/templates/NAME/DIGEST`), whose claims are measured too
    #[arg(long, value_name = "FOLDER")]
    template: Option<PathBuf>,
}

/// What all figures are measured with.
struct Bench {
    births: Births,
    snapshot: Snapshot,
    template: Option<linux::Template>,
    /// The median of a claim in this run, in us, once known.
    claim_us: OnceCell<f64>,
}

impl Bench {
    /// A paused VM of such a guest.
    fn restored(&self, guest: Guest) -> anyhow::Result<Vmm> {
        let snapshot = Snapshot::of(&self.births, guest)?;
        let mut vmm = snapshot.shell(&self.births)?;
        vmm.expect(&Request::Restore, &[&snapshot.image])?;
        Ok(vmm)
    }
}

/// Measures all that is asked for.
///
/// # Errors
/// Where a pattern names no row, KVM is missing, the user is not root, or a VM failed.
pub(super) fn measure(command: &VmmBench) -> anyhow::Result<Vec<Row>> {
    let figures = chosen(&command.only)?;
    let template = command.template.as_deref().map(linux::Template::open).transpose()?;
    if figures.iter().all(|figure| matches!(figure, Figure::Linux)) {
        template.as_ref().context("a Linux guest's claim needs --template")?;
    }
    let births = Births::new()?;
    let snapshot = Snapshot::take(&births)?;
    let bench = Bench { births, snapshot, template, claim_us: OnceCell::new() };
    let mut rows = Vec::new();
    for figure in figures {
        let measured = figure.measure(&bench)?;
        rows.extend(measured.into_iter().filter(|row| is_wanted(&row.name, &command.only)));
    }
    Ok(rows)
}

/// The figures that have a row which is wanted.
fn chosen(only: &[String]) -> anyhow::Result<Vec<Figure>> {
    let all = Figure::all();
    let names: Vec<_> = all.iter().flat_map(Figure::rows).collect();
    for pattern in only {
        if !names.iter().any(|name| matches(name, pattern)) {
            bail!(
                "no row is called {pattern:?}, and no name begins with it before a dot. There are: {}",
                names.join(", ")
            );
        }
    }
    Ok(all.into_iter().filter(|figure| figure.rows().iter().any(|name| is_wanted(name, only))).collect())
}

fn is_wanted(name: &str, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|pattern| matches(name, pattern))
}

fn matches(name: &str, pattern: &str) -> bool {
    name.strip_prefix(pattern).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(only: &[&str]) -> Result<Vec<String>, String> {
        let only: Vec<_> = only.iter().map(|&pattern| pattern.to_owned()).collect();
        let figures = chosen(&only).map_err(|error| error.to_string())?;
        let rows = figures.iter().flat_map(Figure::rows);
        Ok(rows.filter(|name| is_wanted(name, &only)).collect())
    }

    #[test]
    fn a_row_is_chosen_by_its_name_or_by_what_it_begins_with() {
        assert_eq!(rows(&["rewind_us.10"]).unwrap(), ["rewind_us.10"], "not those of 100 pages");
        assert_eq!(rows(&["rewind_us", "creates_per_core_second"]).unwrap().len(), 5);
        assert_eq!(
            rows(&["claim"]).unwrap(),
            ["claim.test_guest_us", "claim.linux_us", "claim.linux_first_answer_us", "claim.linux_connected_us"],
            "the limit is measured with it, and not told"
        );
        let all = rows(&[]).unwrap();
        let mut names = all.clone();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all.len(), "no two rows of a report have the same name");
    }

    #[test]
    fn what_names_no_row_is_refused_with_the_names() {
        let refusal = rows(&["rewind_us", "rewind"]).unwrap_err();
        assert!(refusal.contains("\"rewind\"") && refusal.contains("rewind_us.10,"), "{refusal}");
        assert!(rows(&[""]).is_err());
    }
}
