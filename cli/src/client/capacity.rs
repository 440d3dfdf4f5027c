//! `stasis capacity`.

use bytesize::ByteSize;
use stasis_pool_api::{Capacity, RetryRule, TemplateCost, Turns};

use super::{
    Outcome, Terminal,
    answer::{get, show},
    template::columns,
    url::ApiUrl,
};

/// What is shown.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct CapacityArgs {
    /// Print the gateway's JSON
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(url: &ApiUrl, args: CapacityArgs, terminal: &mut Terminal) -> anyhow::Result<Outcome> {
    let answer = get(url, "/v1/capacity").await?;
    show(terminal, args.json, &answer, |capacity| text(&capacity))
}

/// The formulas with their numbers, then what a VM of each template counts with.
fn text(capacity: &Capacity) -> String {
    let Capacity { memory, vcpus, starts, repairs, retry_after, templates } = capacity;
    let RetryRule { min_s, max_s, .. } = retry_after;
    let turns = |Turns { limit, under_way, queued, per_s }: &Turns| {
        let rate = per_s.map_or_else(|| "rate not measured yet".to_owned(), |rate| format!("{rate:.1} per s"));
        format!("{under_way} of {limit} at a time, {queued} queued, {rate}")
    };
    let sums = [
        [
            "memory".to_owned(),
            format!(
                "{} free = {} limit - {} committed - {} expected dirty - {} shared",
                size(memory.free),
                size(memory.limit),
                size(memory.committed),
                size(memory.expected_dirty),
                size(memory.shared)
            ),
        ],
        [
            "vcpus".to_owned(),
            format!(
                "{} free = {} cores x {} - {} committed",
                vcpus.free, vcpus.cores, vcpus.overcommit, vcpus.committed
            ),
        ],
        [
            "full".to_owned(),
            format!(
                "retry after (needed - free + {} waited for) / {} returned per s; {} are returning",
                size(memory.waited_for),
                per_s(memory.returned_per_s),
                size(memory.returning)
            ),
        ],
        [
            String::new(),
            format!(
                "or of vcpus: (needed - free + {}) / {:.1}; {} are returning; {min_s} to {max_s} s",
                vcpus.waited_for, vcpus.returned_per_s, vcpus.returning
            ),
        ],
        ["starts".to_owned(), turns(starts)],
        ["repairs".to_owned(), turns(repairs)],
    ];
    let head = ["TEMPLATE", "RUNNING", "PAUSED", "IMAGE", "LIVES", "DIRTY P99"].map(str::to_owned);
    let rows = templates.iter().map(|TemplateCost { template, running, paused, image, lives, dirty_p99 }| {
        let dirty = dirty_p99.map_or_else(|| "-".to_owned(), size);
        [template.to_string(), size(*running), size(*paused), size(*image), lives.to_string(), dirty]
    });
    let table = columns(&std::iter::once(head).chain(rows).collect::<Vec<_>>());
    format!("{}\n{table}", columns(&sums))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast saturates")]
fn per_s(bytes: f64) -> String {
    size(bytes.round() as u64)
}

fn size(bytes: u64) -> String {
    ByteSize::b(bytes).display().iec().to_string()
}

#[cfg(test)]
mod tests {
    use stasis_pool_api::{MemoryCapacity, VcpuCapacity};

    use super::*;

    #[test]
    fn the_sums_can_be_read() {
        let mib = |mib: u64| mib << 20;
        let capacity = Capacity {
            memory: MemoryCapacity {
                limit: mib(1000),
                committed: mib(528),
                expected_dirty: mib(100),
                shared: mib(50),
                free: mib(322),
                formula: String::new(),
                returning: mib(72),
                waited_for: mib(8),
                returned_per_s: 1536.0 * 1024.0,
            },
            vcpus: VcpuCapacity {
                cores: 2,
                overcommit: 32,
                limit: 64,
                committed: 3,
                free: 61,
                returning: 1,
                waited_for: 2,
                returned_per_s: 0.25,
            },
            starts: Turns { limit: 4, under_way: 4, queued: 3, per_s: Some(12.34) },
            repairs: Turns { limit: 2, under_way: 0, queued: 0, per_s: None },
            retry_after: RetryRule { formula: String::new(), lately_s: 30, min_s: 1, max_s: 30 },
            templates: vec![TemplateCost {
                template: "wordcount".parse().unwrap(),
                running: mib(264),
                paused: mib(20),
                image: mib(50),
                lives: 7,
                dirty_p99: None,
            }],
        };
        let text = text(&capacity);
        for line in [
            "memory   322.0 MiB free = 1000.0 MiB limit - 528.0 MiB committed - 100.0 MiB expected dirty - 50.0 MiB shared",
            "vcpus    61 free = 2 cores x 32 - 3 committed",
            "full     retry after (needed - free + 8.0 MiB waited for) / 1.5 MiB returned per s; 72.0 MiB are returning",
            "         or of vcpus: (needed - free + 2) / 0.2; 1 are returning; 1 to 30 s",
            "starts   4 of 4 at a time, 3 queued, 12.3 per s",
            "repairs  0 of 2 at a time, 0 queued, rate not measured yet",
            "wordcount  264.0 MiB  20.0 MiB  50.0 MiB  7      -",
        ] {
            assert!(text.lines().any(|one| one == line), "no {line:?} in:\n{text}");
        }
    }
}
