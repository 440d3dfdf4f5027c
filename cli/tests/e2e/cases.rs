//! The cases, by what they are about.

mod adoption;
mod bad_templates;
mod callers;
mod churn;
mod clock;
mod command_line;
mod commands;
mod counts;
mod crashes;
mod crowds;
mod cycles;
mod damage;
mod identity;
mod jail;
mod kill;
mod metrics;
mod mixture;
mod node_js;
mod operation;
mod owners;
mod pager;
mod pass_through;
mod races;
mod restart;
mod sandboxes;
mod shortage;
mod start_up;
mod templates;
mod tenants;
mod verbs;

use crate::world::World;

/// What a case needs beside the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Nothing: it runs in both lanes.
    Http,
    /// Files, processes or the log of the server's host.
    Host,
    /// The same, and the bare guest.
    Bare,
}

/// One case. Its name is a sentence.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) needs: Needs,
    pub(crate) run: fn(&World),
}

const fn over_http(name: &'static str, run: fn(&World)) -> Case {
    Case { name, needs: Needs::Http, run }
}

const fn on_the_host(name: &'static str, run: fn(&World)) -> Case {
    Case { name, needs: Needs::Host, run }
}

const fn of_the_bare_guest(name: &'static str, run: fn(&World)) -> Case {
    Case { name, needs: Needs::Bare, run }
}

pub(crate) fn all() -> Vec<Case> {
    let groups = [
        // The longest first: two run at once.
        damage::cases(),
        kill::cases(),
        adoption::cases(),
        owners::cases(),
        churn::cases(),
        races::cases(),
        restart::cases(),
        cycles::cases(),
        crowds::cases(),
        shortage::cases(),
        verbs::cases(),
        pager::cases(),
        sandboxes::cases(),
        commands::cases(),
        tenants::cases(),
        bad_templates::cases(),
        identity::cases(),
        clock::cases(),
        templates::cases(),
        counts::cases(),
        pass_through::cases(),
        node_js::cases(),
        crashes::cases(),
        callers::cases(),
        start_up::cases(),
        command_line::cases(),
        operation::cases(),
        metrics::cases(),
        jail::cases(),
    ];
    groups.into_iter().flatten().collect()
}
