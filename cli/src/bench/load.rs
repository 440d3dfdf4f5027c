//! Invocations under a closed loop: latency and its phases by one client, throughput by several.

use std::time::Duration;

use anyhow::bail;
use http::Request;
use stasis_loadtest::{Finished, Histogram, Row, Unit, closed_loop, per_second};
use stasis_pool_api::StartKind;

use super::end::{End, PHASES, Tally};
use crate::client::{
    ApiUrl, Outgoing,
    http::{self as api, Connection},
};

/// What is not counted at a throughput's beginning: the pool's stock is used up.
pub(super) const WARM_UP: Duration = Duration::from_secs(2);

/// What a claim takes, of [`PHASES`].
const CLAIM_PHASES: [&str; 4] = ["queue", "claim", "restore", "repair"];

/// What is asked, and what each figure's note says of it.
pub(super) struct Subject<'a> {
    pub(super) url: &'a ApiUrl,
    pub(super) path: String,
    pub(super) guest: String,
    pub(super) kernel: String,
}

impl Subject<'_> {
    pub(super) async fn latency(&self, length: Duration) -> anyhow::Result<Vec<Row>> {
        let calls = self.drive(1, length).await?;
        let tally = Tally::of(&calls);
        tally.tell("one request at a time");
        let mut seen = Histogram::new(Unit::Millis);
        let mut whole = Histogram::new(Unit::Millis);
        let mut phases = PHASES.map(|_| Histogram::new(Unit::Millis));
        let mut hit = Histogram::new(Unit::Millis);
        for call in &calls {
            let End::Answered { timing, start } = &call.value else { continue };
            if *start == StartKind::Paused {
                // All but the function's own time.
                hit.record_time(CLAIM_PHASES.iter().filter_map(|phase| timing.get(phase)).sum());
            }
            let times = PHASES.map(|phase| timing.get(phase).unwrap_or_default());
            whole.record_time(times.iter().sum());
            seen.record_time(call.took);
            for (histogram, time) in phases.iter_mut().zip(times) {
                histogram.record_time(time);
            }
        }
        if whole.is_empty() {
            bail!(
                "no invocation of {} was answered: {}",
                self.path,
                tally.first_failure.unwrap_or("no VM came free; is somebody else using them?")
            );
        }
        let how = format!("GET {}, one request at a time; start: {tally}; {}", self.path, self.kernel);
        let whole = whole.row(
            "claim_to_answer_ms",
            format!(
                "sum of the five phases, of which {}; the client saw p50 {:.3} ms; {how}",
                self.guest,
                seen.quantile(0.5)
            ),
        );
        let phases = phases.iter().zip(PHASES).map(|(histogram, phase)| {
            // Only this phase holds a request to the function.
            let share = if phase == "guest" { "of which" } else { "beside" };
            histogram.row(format!("{phase}_ms"), format!("{share} {}; {how}", self.guest))
        });
        if hit.is_empty() {
            bail!(
                "no request met a VM that stood ready: pool.claim_hit_ms cannot be measured; is somebody else using the pool?"
            );
        }
        let hit = hit.row(
            "pool.claim_hit_ms",
            format!("claims that took a VM which stood ready, to its verified certificate; {how}"),
        );
        Ok(std::iter::once(whole).chain(phases).chain([hit]).collect())
    }

    /// Answers per second.
    pub(super) async fn throughput(&self, clients: usize, length: Duration) -> anyhow::Result<Row> {
        let calls = self.drive(clients, WARM_UP + length).await?;
        let tally = Tally::of(&calls);
        tally.tell(&count_clients(clients));
        let answered = calls.iter().filter(|call| matches!(call.value, End::Answered { .. }));
        let seconds = usize::try_from(length.as_secs())?;
        let windows = per_second(answered.map(|call| call.at), WARM_UP, seconds);
        let mut histogram = Histogram::new(Unit::PerSecond);
        #[allow(clippy::cast_precision_loss, reason = "nobody answers 2^53 requests")]
        windows.iter().for_each(|&count| histogram.record(count as f64));
        let total: u64 = windows.iter().sum();
        #[allow(clippy::cast_precision_loss, reason = "nobody answers 2^53 requests")]
        let mean = total as f64 / length.as_secs_f64();
        let note = format!(
            "closed loop (each client asks again once answered: right for throughput, hides latency); over {seconds} windows of 1 s, after {} s \
             of warm-up; {total} answers in them, mean {mean:.2} per s; with the warm-up, start: {tally}; GET {}; in each answer {}; {}",
            WARM_UP.as_secs(),
            self.path,
            self.guest,
            self.kernel,
        );
        Ok(histogram.row(format!("invocations_per_second_{clients}"), note))
    }

    async fn drive(&self, clients: usize, length: Duration) -> anyhow::Result<Vec<Finished<End>>> {
        let mut connections = Vec::new();
        for _ in 0..clients {
            connections.push(Some(Connection::open(self.url).await?));
        }
        let calls = closed_loop(connections, length, async |connection: &mut Option<Connection>| {
            // What failed may have left the connection in the middle of an answer.
            let mut taken = match connection.take() {
                Some(open) => open,
                None => match Connection::open(self.url).await {
                    Ok(opened) => opened,
                    Err(error) => return End::Failed(format!("{error:#}")),
                },
            };
            match self.invoke(&mut taken).await {
                Ok(end) => {
                    *connection = Some(taken);
                    end
                }
                Err(error) => End::Failed(format!("{error:#}")),
            }
        });
        Ok(calls.await)
    }

    async fn invoke(&self, connection: &mut Connection) -> anyhow::Result<End> {
        let answer = connection.send(Request::get(&self.path).body(Outgoing::empty())?).await?;
        let (head, body) = answer.into_parts();
        let body = api::read(body).await?;
        Ok(End::of(head.status, &head.headers, &body))
    }
}

pub(super) fn count_clients(clients: usize) -> String {
    if clients == 1 { "1 client".into() } else { format!("{clients} clients") }
}
