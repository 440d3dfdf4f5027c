//! The list of series in docs/operations.md is the list of those that are described.

use std::{collections::BTreeSet, sync::Mutex};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

/// What was described, and as which kind.
#[derive(Default)]
struct Described(Mutex<BTreeSet<(String, &'static str)>>);

impl Described {
    fn add(&self, name: &KeyName, kind: &'static str) {
        assert!(self.0.lock().unwrap().insert((name.as_str().to_owned(), kind)), "{name:?} is described twice");
    }
}

impl Recorder for Described {
    fn describe_counter(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.add(&name, "counter");
    }
    fn describe_gauge(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.add(&name, "gauge");
    }
    fn describe_histogram(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.add(&name, "histogram");
    }
    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }
    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[test]
fn operations_md_lists_the_nodes_series_and_their_kinds() {
    let described = Described::default();
    metrics::with_local_recorder(&described, super::describe);
    let page = include_str!("../../../docs/operations.md");
    let (_, section) = page.split_once("\n## Metrics\n").unwrap();
    let rows =
        section.lines().take_while(|line| !line.starts_with("## ")).map(|line| line.split('|').collect::<Vec<_>>());
    let mut listed = BTreeSet::new();
    for row in rows.filter(|row| row.len() > 4) {
        let kind = ["counter", "gauge", "histogram"].into_iter().find(|kind| row[2].trim() == *kind);
        let names = row[1].split('`').filter(|name| name.starts_with("stasis_") && !name.starts_with("stasis_invoke_"));
        listed.extend(names.map(|name| (name.to_owned(), kind.unwrap_or("of no kind"))));
    }
    assert_eq!(listed, described.0.into_inner().unwrap());
}
