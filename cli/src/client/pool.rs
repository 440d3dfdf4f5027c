//! `stasis pool list | inspect | set`.

use std::time::Duration;

use anyhow::Context as _;
use bytesize::ByteSize;
use http::Method;
use serde::Deserialize;
use serde_json::Value;
use stasis_pool_api::{BoundBy, PoolPatch, PoolStatus, TemplateName};

use super::{
    Outcome, Terminal, print,
    sandbox::{Output, ask, duration, json_line},
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
    /// Show all that is known of one
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
            let answer = ask(url, Method::GET, "/v1/pools", &Value::Null).await?;
            if output.json {
                return json_line(terminal, &answer);
            }
            let Listing { pools } = serde_json::from_slice(&answer).context("the gateway's list is not understood")?;
            print(&mut terminal.out, table(&pools).as_bytes())?;
            Ok(Outcome::Success)
        }
        PoolCommand::Inspect { template, output } => {
            let answer = ask(url, Method::GET, &of(&template), &Value::Null).await?;
            if output.json {
                return json_line(terminal, &answer);
            }
            let value: Value = serde_json::from_slice(&answer).context("the gateway's answer is not understood")?;
            print(&mut terminal.out, format!("{value:#}\n").as_bytes())?;
            Ok(Outcome::Success)
        }
        PoolCommand::Set { template, min, max, hot, buffer, weight, max_memory, scale_to_zero_after, output } => {
            let patch = PoolPatch { min, max, hot, buffer, weight, max_memory, scale_to_zero_after };
            let answer = ask(url, Method::PATCH, &of(&template), &serde_json::to_value(&patch)?).await?;
            if output.json {
                return json_line(terminal, &answer);
            }
            let pool: PoolStatus = serde_json::from_slice(&answer).context("the gateway's answer is not understood")?;
            print(&mut terminal.out, table(&[pool]).as_bytes())?;
            Ok(Outcome::Success)
        }
    }
}

fn table(pools: &[PoolStatus]) -> String {
    let head = ["TEMPLATE", "TARGET", "PAUSED", "HOT", "CLAIMED", "COMING", "WAITING", "MIN", "MAX", "BOUND BY"]
        .map(str::to_owned);
    let rows = pools.iter().map(|pool| {
        let coming = pool.restoring + pool.rewinding + pool.warming;
        let numbers = [pool.target, pool.ready, pool.hot, pool.claimed, coming, pool.waiting];
        let [target, ready, hot, claimed, coming, waiting] = numbers.map(|number| number.to_string());
        let (min, max) = (pool.settings.min.to_string(), pool.settings.max.to_string());
        let bound = pool.bound_by.map_or("-", in_words).to_owned();
        [pool.template.to_string(), target, ready, hot, claimed, coming, waiting, min, max, bound]
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
