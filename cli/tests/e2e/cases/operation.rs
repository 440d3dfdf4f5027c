//! What those who run a server look at.

use super::{Case, over_http};
use crate::world::World;

pub(super) fn cases() -> Vec<Case> {
    vec![
        over_http("/healthz is well", |world| {
            assert_eq!(world.api.get("/healthz").success()["status"], "ok");
        }),
        over_http("/metrics has the series of gateway and pool by template", metrics),
    ]
}

fn metrics(world: &World) {
    world.api.post("/invoke/wordcount/", b"a").success();
    let answer = world.api.get("/metrics");
    assert_eq!(answer.status(), 200);
    assert!(answer.header("content-type").starts_with("text/plain"));
    let text = answer.text();
    let series: Vec<_> = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    for line in &series {
        let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line:?}"));
        let (name, labels) = name.split_once('{').unwrap_or((name, "}"));
        assert!(name.starts_with("stasis_") && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{line:?}");
        assert!(labels.ends_with('}') && value.parse::<f64>().is_ok(), "{line:?}");
    }
    for name in [
        "stasis_invoke_requests_total",
        "stasis_invoke_duration_seconds_bucket",
        "stasis_pool_claims_total",
        "stasis_pool_claim_seconds_count",
        "stasis_pool_ready",
        "stasis_pool_target",
    ] {
        let of_wordcount =
            |line: &&&str| line.starts_with(&format!("{name}{{")) && line.contains("template=\"wordcount\"");
        assert!(series.iter().any(|line| of_wordcount(&line)), "no {name} of wordcount in\n{text}");
    }
    assert!(text.contains("# TYPE stasis_pool_claims_total counter"), "{text}");
}
