//! Invocations' lives: rewound beside destroyed, and what a refill costs.

use std::time::Instant;

use stasis_loadtest::{Histogram, Row, Unit};
use stasis_vmm_api::Request;

use super::{
    Bench,
    claims::cpu_time,
    guest::{DONE, Guest, Snapshot},
};

const LIVES: usize = 100;
const REFILLS: u32 = 100;
/// Pages that each life writes: 1 MiB.
const PAGES: u64 = 256;
/// How many times as fast rewinding shall be.
const TIMES_DESTROYED: f64 = 5.0;

pub(super) const NAMES: [&str; 2] = ["invoke.rewound_per_s", "invoke.destroyed_per_s"];
pub(super) const REFILL: &str = "pool.refill_per_s_core";

/// Both kinds of life in turns, so that whatever else the machine does befalls both.
pub(super) fn lives(bench: &Bench) -> anyhow::Result<Vec<Row>> {
    let guest = Guest { pages: PAGES, ..Guest::default() };
    let snapshot = Snapshot::of(&bench.births, guest)?;
    let mut kept = snapshot.shell(&bench.births)?;
    kept.expect(&Request::Restore, &[&snapshot.image])?;
    let [mut rewound, mut destroyed] = [Histogram::new(Unit::PerSecond), Histogram::new(Unit::PerSecond)];
    for _ in 0..LIVES {
        let start = Instant::now();
        kept.expect(&Request::Resume, &[])?;
        kept.console_has(DONE)?;
        kept.expect(&Request::Rewind, &[])?;
        rewound.record(1.0 / start.elapsed().as_secs_f64());

        let start = Instant::now();
        let mut vmm = bench.births.unprepared(&snapshot.machine, Some(snapshot.state()?))?;
        vmm.order_restore(&[&snapshot.image])?;
        super::births::checked(vmm.client.reply()?)?;
        vmm.is_restored()?;
        vmm.console_has(DONE)?;
        // Killed, and waited for.
        drop(vmm);
        destroyed.record(1.0 / start.elapsed().as_secs_f64());
    }
    let (ours, other) = (rewound.quantile(0.5), destroyed.quantile(0.5));
    let life = format!(
        "one life after the other, of a test guest that writes {PAGES} pages, each in turn with the other kind"
    );
    let target =
        format!("target: at least {TIMES_DESTROYED} times the other; the median is {:.2} times it", ours / other);
    Ok(vec![
        rewound.row(NAMES[0], format!("{life}: resumed, has told that it has written, rewound; {target}")),
        destroyed
            .row(NAMES[1], format!("{life}: process born, restored, has told that it has written, killed and reaped")),
    ])
}

/// Restored, paused VMs, one after the other.
pub(super) fn refills(bench: &Bench) -> anyhow::Result<Row> {
    let before = cpu_time()?;
    for _ in 0..REFILLS {
        let mut vmm = bench.snapshot.shell(&bench.births)?;
        vmm.expect(&Request::Restore, &[&bench.snapshot.image])?;
    }
    let spent = cpu_time()?.saturating_sub(before);
    let mut rate = Histogram::new(Unit::PerSecond);
    rate.record(f64::from(REFILLS) / spent.as_secs_f64());
    Ok(rate.row(
        REFILL,
        format!(
            "{REFILLS} test guests from birth to standing paused, and their ends, over the processor time that they and this took: what \
             a core can refill"
        ),
    ))
}
