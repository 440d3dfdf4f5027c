//! `stasis pool list | inspect | set`.

use std::time::Duration;

use bytesize::ByteSize;
use http::Method;
use serde::Deserialize;
use stasis_pool_api::{BoundBy, PoolPatch, PoolStatus, TemplateName, Window};

use super::{
    Outcome, Terminal,
    answer::{all, ask, get, show},
    sandbox::{Output, duration},
    template::columns,
    url::ApiUrl,
};

/// Pools: the VMs that stand ready for a template's requests
#[derive(Debug, Clone, clap::Subcommand)]
pub(crate) enum PoolCommand {
    /// List them
    List {
        #[command(flatten)]
        output: Output,
    },
    /// Show all that is known of one, as JSON on many lines; with --json, on one
    Inspect {
        /// Its template
        template: TemplateName,
        #[command(flatten)]
        output: Output,
    },
    /// Change how many VMs it keeps; what is not given stays, and restarts keep it
    Set {
        /// Its template
        template: TemplateName,
        /// VMs kept ready, hot ones included
        #[arg(long)]
        min: Option<u32>,
        /// Most VMs at once
        #[arg(long)]
        max: Option<u32>,
        /// How many of the ready ones are hot: running, proved, connected
        #[arg(long)]
        hot: Option<u32>,
        /// VMs kept ready while at least one is claimed
        #[arg(long)]
        buffer: Option<u32>,
        /// Its share of the node's restores
        #[arg(long)]
        weight: Option<u32>,
        /// Most memory of its VMs together, such as 2GiB; 0B takes the limit away
        #[arg(long, value_name = "SIZE")]
        max_memory: Option<ByteSize>,
        /// How long it may be idle before it keeps nothing ready; 0s: for ever
        #[arg(long, value_parser = duration, value_name = "TIME")]
        scale_to_zero_after: Option<Duration>,
        /// Most requests of this tenant at once, up to what the template allows for all; 0 takes the limit away
        #[arg(long)]
        concurrency: Option<u32>,
        /// VMs kept ready at other times (UTC), as DAYS/FROM-TO/MIN, such as mon,tue,wed/08:00-18:00/5; once for each window, which together
        /// replace those that were there
        #[arg(long, value_name = "WINDOW")]
        schedule: Vec<Window>,
        /// Take all windows away
        #[arg(long, conflicts_with = "schedule")]
        no_schedule: bool,
        #[command(flatten)]
        output: Output,
    },
}

#[derive(Deserialize)]
struct Listing {
    pools: Vec<PoolStatus>,
}

pub(super) async fn run(url: &ApiUrl, command: PoolCommand, terminal: &mut Terminal) -> anyhow::Result<Outcome> {
    let of = |template: &TemplateName| format!("/v1/pools/{template}");
    match command {
        PoolCommand::List { output } => {
            let answer = get(url, "/v1/pools").await?;
            show(terminal, output.json, &answer, |Listing { pools }| table(&pools))
        }
        PoolCommand::Inspect { template, output } => {
            let answer = get(url, &of(&template)).await?;
            show(terminal, output.json, &answer, all)
        }
        PoolCommand::Set {
            template,
            min,
            max,
            hot,
            buffer,
            weight,
            max_memory,
            scale_to_zero_after,
            concurrency,
            schedule,
            no_schedule,
            output,
        } => {
            let schedule = (no_schedule || !schedule.is_empty()).then_some(schedule);
            let patch =
                PoolPatch { min, max, hot, buffer, weight, max_memory, scale_to_zero_after, concurrency, schedule };
            let answer = ask(url, Method::PATCH, &of(&template), &serde_json::to_value(&patch)?).await?;
            show(terminal, output.json, &answer, |pool| table(&[pool]))
        }
    }
}

fn table(pools: &[PoolStatus]) -> String {
    let head = [
        "TEMPLATE", "TARGET", "PAUSED", "HOT", "CLAIMED", "COMING", "WAITING", "MIN", "MAX", "LIMIT", "SCHEDULE",
        "BOUND BY",
    ]
    .map(str::to_owned);
    let rows = pools.iter().map(|pool| {
        let coming = pool.restoring + pool.rewinding + pool.warming;
        let numbers = [pool.target, pool.ready, pool.hot, pool.claimed, coming, pool.waiting];
        let [target, ready, hot, claimed, coming, waiting] = numbers.map(|number| number.to_string());
        let (min, max) = (pool.settings.min.to_string(), pool.settings.max.to_string());
        let bound = pool.bound_by.map_or("-", in_words).to_owned();
        let limit = pool.settings.concurrency.map_or_else(|| "-".to_owned(), |limit| limit.to_string());
        let schedule: Vec<_> = pool.settings.schedule.iter().map(Window::to_string).collect();
        let schedule = if schedule.is_empty() { "-".to_owned() } else { schedule.join(" ") };
        [pool.template.to_string(), target, ready, hot, claimed, coming, waiting, min, max, limit, schedule, bound]
    });
    columns(&std::iter::once(head).chain(rows).collect::<Vec<_>>())
}

const fn in_words(bound: BoundBy) -> &'static str {
    match bound {
        BoundBy::Max => "max",
        BoundBy::MaxMemory => "max_memory",
        BoundBy::NodeMemory => "the node's memory",
        BoundBy::Idle => "idle",
        BoundBy::Failures => "failures",
    }
}
