//! Sandboxes' series after known events.

use metrics_exporter_prometheus::PrometheusBuilder;

use super::{super::Measured, *};

#[tokio::test]
async fn known_events_are_counted_exactly() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let _here = ::metrics::set_default_local_recorder(&recorder);
    let bench = Bench::storing_in(Arc::new(Measured(MemoryStore::default()))).await;
    let ids = [bench.create("").await, bench.create("").await, bench.create("").await];
    for (to, id) in [(PauseTo::Ram, &ids[0]), (PauseTo::Disk, &ids[1])] {
        within(bench.sandboxes.pause(id, to)).await.unwrap();
        within(bench.sandboxes.resume(id, None)).await.unwrap();
    }
    within(bench.sandboxes.pause(&ids[2], PauseTo::Ram)).await.unwrap();
    within(bench.sandboxes.kill(&ids[0])).await.unwrap();

    let shown = recorder.handle().render();
    for line in [
        "stasis_sandboxes{state=\"running\"} 1",
        "stasis_sandboxes{state=\"suspended\"} 1",
        "stasis_sandboxes{state=\"hibernated\"} 0",
        "stasis_sandbox_transitions_total{event=\"paused\"} 3",
        "stasis_sandbox_transitions_total{event=\"hibernated\"} 1",
        "stasis_sandbox_pause_seconds_count 3",
        "stasis_sandbox_hibernate_seconds_count 1",
        "stasis_sandbox_resume_seconds_count{from=\"suspended\"} 1",
        "stasis_sandbox_resume_seconds_count{from=\"hibernated\"} 1",
        "stasis_store_operation_seconds_count{operation=\"create\"} 3",
        // Started three times; a pause is two changes, a resume two, a hibernation two, a kill two.
        "stasis_store_operation_seconds_count{operation=\"commit\"} 17",
    ] {
        assert!(shown.lines().any(|one| one == line), "no {line} in:\n{shown}");
    }
}
