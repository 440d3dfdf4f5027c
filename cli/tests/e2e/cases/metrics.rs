//! What a scrape shows after a known workload: what docs/operations.md lists, in Prometheus's own form.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Write as _,
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::json;

use super::{
    Case, over_http,
    sandboxes::{command, create},
};
use crate::{
    lane::variable,
    world::{World, eventually},
};

/// How long it may take until a used VM has been rewound.
const SOON: Duration = Duration::from_secs(60);

/// Series that are there once something was refused, lost or given up, which this workload has none of.
const EVENTS: [&str; 6] = [
    "stasis_invoke_shed_total",
    "stasis_pool_evicted_total",
    "stasis_pool_hot_checks_total",
    "stasis_store_errors_total",
    "stasis_store_conflicts_total",
    "stasis_admission_refused_total",
];

pub(super) fn cases() -> Vec<Case> {
    vec![over_http("/metrics shows what operations.md lists, promtool accepts it, and no label has an id", metrics)]
}

/// A series of the list.
struct Listed {
    kind: String,
    labels: BTreeSet<String>,
}

fn listed() -> BTreeMap<String, Listed> {
    let page = include_str!("../../../../docs/operations.md");
    let (_, section) = page.split_once("\n## Metrics\n").unwrap();
    let quoted = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let mut all = BTreeMap::new();
    for line in section.lines().take_while(|line| !line.starts_with("## ")) {
        if let [_, names, kind, labels, ..] = line.split('|').collect::<Vec<_>>()[..] {
            for name in quoted(names) {
                let listed = Listed { kind: kind.trim().to_owned(), labels: quoted(labels).into_iter().collect() };
                assert!(all.insert(name.clone(), listed).is_none(), "{name} is listed twice");
            }
        }
    }
    all
}

/// A line of the scrape: name, labels.
fn parse(line: &str) -> (&str, BTreeMap<&str, &str>) {
    let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line:?}"));
    assert!(value.parse::<f64>().is_ok(), "{line:?}");
    let Some((name, labels)) = series.split_once('{') else { return (series, BTreeMap::new()) };
    let labels = labels.strip_suffix("\"}").unwrap_or_else(|| panic!("{line:?}"));
    (name, labels.split("\",").map(|label| label.split_once("=\"").unwrap_or_else(|| panic!("{line:?}"))).collect())
}

fn metrics(world: &World) {
    // The known workload: an invocation, and a sandbox through each of its states.
    let answer = world.api.call("POST", "/invoke/wordcount/", &[("X-Request-Id", "the-only-one")], b"a");
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let vm = answer.header("x-stasis-vm").to_owned();
    let sandbox = create(&world.api, &json!({}));
    for (verb, body) in
        [("pause", json!({})), ("resume", json!({})), ("pause", json!({ "to": "disk" })), ("resume", json!({}))]
    {
        let done = command(&world.api, &sandbox, verb, &body);
        assert!([200, 201].contains(&done.status()), "{verb}: {}", done.text());
    }
    let killed = world.api.call("DELETE", &format!("/v1/sandboxes/{sandbox}"), &[], b"");
    assert_eq!(killed.status(), 204, "{}", killed.text());

    let listed = listed();
    let text = eventually("a series of every event", SOON, || {
        let answer = world.api.get("/metrics");
        assert_eq!(answer.status(), 200);
        assert!(answer.header("content-type").starts_with("text/plain"));
        let text = answer.text();
        let lacks =
            listed.keys().find(|name| !EVENTS.contains(&name.as_str()) && !text.contains(&format!("# TYPE {name} ")));
        match lacks {
            Some(name) => {
                println!("not there yet: {name}");
                None
            }
            None => Some(text),
        }
    });
    promtool(&text);

    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        let known = listed.get(name).unwrap_or_else(|| panic!("{name} is not in docs/operations.md"));
        assert_eq!(known.kind, kind, "{name}");
    }
    let mut first_buckets = BTreeMap::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (name, mut labels) = parse(line);
        let whole = ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part));
        let whole = whole.filter(|whole| listed.contains_key(*whole)).unwrap_or(name);
        let known = listed.get(whole).unwrap_or_else(|| panic!("{name} is not in docs/operations.md"));
        if let Some(bound) = labels.remove("le") {
            first_buckets.entry(whole).or_insert_with(|| bound.to_owned());
        }
        let has: BTreeSet<_> = labels.keys().map(|label| (*label).to_owned()).collect();
        assert_eq!(has, known.labels, "{line}");
        for value in labels.values() {
            let is_an_id = [vm.as_str(), sandbox.as_str(), "the-only-one"].contains(value) || looks_like_an_id(value);
            assert!(!is_an_id, "{line}");
        }
    }
    for (name, listed) in
        listed.iter().filter(|(name, listed)| listed.kind == "histogram" && first_buckets.contains_key(name.as_str()))
    {
        let wanted = if name.ends_with("_bytes") { "65536" } else { "0.0005" };
        assert_eq!(first_buckets[name.as_str()], wanted, "{name} ({})", listed.kind);
    }
    assert!(first_buckets.len() > 10, "{first_buckets:?}");
}

/// UUIDs, and other long strings of hexadecimal digits.
fn looks_like_an_id(value: &str) -> bool {
    let digits = value.bytes().filter(u8::is_ascii_hexdigit).count();
    digits >= 12
        && value.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
        && value.bytes().any(|byte| byte.is_ascii_digit())
}

/// Prometheus's own check of form, names, help and units.
fn promtool(text: &str) {
    let tool = variable("STASIS_PROMTOOL").unwrap_or_else(|| "promtool".into());
    let begun = Command::new(&tool)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut checking = match begun {
        Ok(checking) => checking,
        Err(error) => {
            return println!(
                "SKIPPED: the scrape is not checked by {}: {error}; scripts/promtool.sh gets it",
                tool.display()
            );
        }
    };
    // It reads all before it says anything.
    checking.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let said = checking.wait_with_output().unwrap();
    let [out, problems] = [said.stdout, said.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(said.status.success(), "promtool: {out}{problems}");
}
