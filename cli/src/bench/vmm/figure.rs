//! What there is to measure.

use stasis_loadtest::Row;

use super::{Bench, claims, linux, live, lives, paged, rewind, sleep};

/// What is measured together.
#[derive(Debug, Clone, Copy)]
pub(super) enum Figure {
    /// A claim beside the bare limit.
    Claims,
    /// Of a template that a node published.
    Linux,
    /// After so many written pages.
    Rewind(u64),
    /// Memory of paused VMs, and claims beside them.
    Density,
    Creates,
    /// Rewound beside destroyed.
    Lives,
    Refills,
    /// Of a running guest.
    Snapshot(live::Subject),
    /// So many children of a running guest.
    Fork(usize),
    Resume,
    /// With so many written MiB.
    Hibernate(u64),
    Pager,
}

impl Figure {
    /// All, in the order in which they are measured.
    pub(super) fn all() -> Vec<Self> {
        let rewinds = rewind::DIRTY_PAGES.map(Self::Rewind);
        let snapshots = live::SUBJECTS.map(Self::Snapshot);
        let forks = live::CHILDREN.map(Self::Fork);
        let hibernations = sleep::DIRTY_MIB.map(Self::Hibernate);
        let lives = [Self::Density, Self::Creates, Self::Lives, Self::Refills];
        let all = [Self::Claims, Self::Linux].into_iter().chain(rewinds).chain(lives);
        all.chain(snapshots).chain(forks).chain([Self::Resume]).chain(hibernations).chain([Self::Pager]).collect()
    }

    /// The names of its rows.
    pub(super) fn rows(&self) -> Vec<String> {
        match self {
            Self::Claims => vec![claims::LIMIT.into(), claims::OURS.into()],
            Self::Linux => linux::NAMES.map(str::to_owned).into(),
            Self::Rewind(pages) => vec![rewind::name(*pages)],
            Self::Density => claims::DENSITIES.into_iter().flat_map(claims::density_names).collect(),
            Self::Creates => vec![claims::CREATES.into()],
            Self::Lives => lives::NAMES.map(str::to_owned).into(),
            Self::Refills => vec![lives::REFILL.into()],
            Self::Snapshot(subject) => subject.names().into(),
            Self::Fork(children) => live::fork_names(*children).into(),
            Self::Resume => sleep::RESUMES.map(str::to_owned).into(),
            Self::Hibernate(mib) => sleep::hibernate_names(*mib).into(),
            Self::Pager => paged::NAMES.map(str::to_owned).into(),
        }
    }

    pub(super) fn measure(self, bench: &Bench) -> anyhow::Result<Vec<Row>> {
        match self {
            Self::Claims => claims::claims(bench),
            Self::Linux => match &bench.template {
                Some(template) => linux::claims(bench, template),
                None => Ok(Vec::new()),
            },
            Self::Rewind(pages) => Ok(vec![rewind::rewinds(bench, pages)?]),
            Self::Density => claims::density(bench),
            Self::Creates => Ok(vec![claims::creates(bench)?]),
            Self::Lives => lives::lives(bench),
            Self::Refills => Ok(vec![lives::refills(bench)?]),
            Self::Snapshot(subject) => live::snapshots(bench, subject),
            Self::Fork(children) => live::forks(bench, children),
            Self::Resume => sleep::resumes(bench),
            Self::Hibernate(mib) => sleep::hibernations(bench, mib),
            Self::Pager => paged::restores(bench),
        }
    }
}

/// How a median stands to what it may be at most, for a row's note.
pub(super) fn against(median: f64, most: f64, what: &str) -> String {
    format!("target: at most {most:.3} ({what}); the median is {:.2} of it", median / most)
}
