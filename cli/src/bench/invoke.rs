//! What gateway and pool add to a request: a hot hit, beside the same request sent straight to the agent of the same template's VMs.
//!
//! Node, gateway and clients are in this process. A request that goes straight to the agent goes over the connection of a claimed hot VM, as
//! the gateway's would: what is left out is HTTP over loopback, the claim, the gateway's copy of both bodies, and the VM's way back.

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use futures_util::future::try_join_all;
use http::Request;
use stasis_loadtest::{Histogram, Row, Unit};
use stasis_pool_api::{Claim, Node, StartKind, TemplateName, Tenant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{
    load::count_clients,
    sessions::{self, Asked},
    tell,
};
use crate::{
    client::{
        ApiUrl, Outgoing,
        http::{self as api, Connection},
    },
    up::{self, Ending, UpArgs},
};

/// Clients, and how many requests of each kind they make together.
const LOADS: [(usize, usize); 3] = [(1, 400), (8, 800), (64, 1280)];
/// What a hot hit may cost over the request itself, in milliseconds.
const OVERHEAD_MS: f64 = 0.5;
/// How long a claim may wait.
const BUDGET: Duration = Duration::from_secs(30);
/// How long the function works on a request, where it is to work.
const WORK: Duration = Duration::from_millis(100);
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok\n";

/// Where the server's data are, and what to invoke.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct InvokeBench {
    #[command(flatten)]
    up: UpArgs,
    /// Add the figures to this report, a JSON list; those of the same names are replaced
    #[arg(long, value_name = "FILE")]
    pub(super) json: Option<PathBuf>,
    /// A template of the bare guest that keeps VMs hot (`[pool] hot`), built before
    #[arg(long, value_name = "NAME")]
    template: TemplateName,
}

/// On a runtime and in a thread of the server's own: the caller's runtime has one thread.
pub(super) fn measure(command: &InvokeBench) -> anyhow::Result<Vec<Row>> {
    let server = || {
        up::during(&command.up, async |node, address| Ok((rows(node, address, &command.template).await?, Ending::Save)))
    };
    std::thread::scope(|scope| scope.spawn(server).join()).map_err(|_| anyhow::anyhow!("the server panicked"))?
}

async fn rows(node: Arc<dyn Node>, address: SocketAddr, template: &TemplateName) -> anyhow::Result<Vec<Row>> {
    let subject = Subject { node, tenant: Tenant::default(), template: template.clone() };
    let url: ApiUrl = format!("http://{address}").parse()?;
    let mut rows = Vec::new();
    for (clients, requests) in LOADS {
        tell(format_args!("hot hits of {template}: {} …", count_clients(clients)));
        rows.push(subject.overhead(&url, clients, requests).await?);
    }
    tell(format_args!("a paused sandbox of {template}: 64 requests at once …"));
    for asked in [
        Asked { path: format!("/wait/{}", WORK.as_micros()), named: "", works: Some(WORK) },
        Asked { path: "/".into(), named: ".at_once", works: None },
    ] {
        rows.extend(sessions::resumes(&url, template, &asked).await?);
    }
    Ok(rows)
}

/// What one client does.
#[derive(Debug, Clone, Copy)]
struct Calls {
    number: usize,
    /// Each meets a hot VM, and nothing else is under way.
    one_by_one: bool,
}

struct Subject {
    node: Arc<dyn Node>,
    tenant: Tenant,
    template: TemplateName,
}

impl Subject {
    /// Half of the requests the one way, then half the other way, twice: what changes on the machine meanwhile touches both.
    async fn overhead(&self, url: &ApiUrl, clients: usize, requests: usize) -> anyhow::Result<Row> {
        let [mut straight, mut through] = [Histogram::new(Unit::Millis), Histogram::new(Unit::Millis)];
        let mut hot = 0;
        let each = Calls { number: requests / clients / 2, one_by_one: clients == 1 };
        for _ in 0..2 {
            let clients_of = || (0..clients).map(|_| self.straight(each));
            try_join_all(clients_of()).await?.into_iter().flatten().for_each(|time| straight.record_time(time));
            let clients_of = || (0..clients).map(|_| self.through(url, each));
            for (time, is_hot) in try_join_all(clients_of()).await?.into_iter().flatten() {
                through.record_time(time);
                hot += u64::from(is_hot);
            }
        }
        if each.one_by_one && hot < through.len() {
            bail!("{hot} of {} requests met a hot VM: the others' time is not that of a hit", through.len());
        }
        // Both have three digits behind the point, and so has their difference.
        let over = |quantile| ((through.quantile(quantile) - straight.quantile(quantile)).max(0.0) * 1e3).round() / 1e3;
        let [p50, p95, p99] = [0.5, 0.95, 0.99].map(over);
        let goal = format!("target: at most {OVERHEAD_MS} ms over the request itself");
        let target = if clients == 1 { goal.as_str() } else { "the target is for one client" };
        Ok(Row {
            name: format!("invoke.overhead_ms.c{clients}"),
            unit: Unit::Millis.as_str().to_owned(),
            n: through.len(),
            p50,
            p95,
            p99,
            note: format!(
                "GET of a bare guest, {}, {hot} of them hot hits: {:.3} ms through the gateway less {:.3} ms for the same request sent straight to the \
                 agent's vsock ({} of these; percentile less percentile); {target}",
                count_clients(clients),
                through.quantile(0.5),
                straight.quantile(0.5),
                straight.len(),
            ),
        })
    }

    /// To claimed VMs, one after the other: from the first byte written to the last read.
    async fn straight(&self, calls: Calls) -> anyhow::Result<Vec<Duration>> {
        let mut times = Vec::with_capacity(calls.number);
        while times.len() < calls.number {
            if calls.one_by_one {
                self.full().await?;
            }
            let Claim { mut stream, lease, .. } = self.node.claim(&self.tenant, &self.template, BUDGET).await?;
            let begun = Instant::now();
            stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await?;
            let mut answer = [0; ANSWER.len()];
            stream.read_exact(&mut answer).await?;
            let took = begun.elapsed();
            drop((stream, lease));
            if answer != ANSWER {
                bail!("{} is no template of the bare guest: it answers otherwise", self.template);
            }
            times.push(took);
        }
        Ok(times)
    }

    /// As any client: over one connection, one after the other, each to its answer's last byte. With whether its VM was hot.
    async fn through(&self, url: &ApiUrl, calls: Calls) -> anyhow::Result<Vec<(Duration, bool)>> {
        let mut connection = Connection::open(url).await?;
        let path = format!("/invoke/{}/", self.template);
        let mut times = Vec::with_capacity(calls.number);
        while times.len() < calls.number {
            if calls.one_by_one {
                self.full().await?;
            }
            let begun = Instant::now();
            let answer = connection.send(Request::get(&path).body(Outgoing::empty())?).await?;
            let is_hot = answer.headers().get("x-stasis-start").is_some_and(|start| start == StartKind::Hot.as_str());
            let body = api::read(answer.into_body()).await?;
            let took = begun.elapsed();
            if body != "ok\n" {
                bail!("an invocation of {}: {}", self.template, api::reason(&body).unwrap_or_default());
            }
            times.push((took, is_hot));
        }
        Ok(times)
    }

    /// Waits until a hot VM stands there: what is measured is a hit.
    async fn full(&self) -> anyhow::Result<()> {
        let begun = Instant::now();
        loop {
            let pool = self.node.pool(&self.tenant, &self.template).await;
            let pool = pool.with_context(|| format!("there is no template {}: build it first", self.template))?;
            if pool.settings.hot == 0 {
                bail!("{} keeps no VMs hot: set hot in [pool]", self.template);
            }
            if pool.hot > 0 {
                return Ok(());
            }
            if begun.elapsed() > BUDGET {
                bail!("{} has no hot VM after {BUDGET:?}: {}", self.template, pool.last_failure.unwrap_or_default());
            }
            // A node tells of its pools when it is asked, so there is no event to wait for. No time that is measured passes here.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
