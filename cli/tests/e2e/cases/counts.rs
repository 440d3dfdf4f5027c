//! The function's answer is right, by coreutils' count.

use std::process::Command;

use serde_json::{Value, json};

use super::{Case, over_http};
use crate::{cli, fixtures, world::World};

pub(super) fn cases() -> Vec<Case> {
    vec![
        over_http("wordcount counts a real text as coreutils do", |world| {
            let text = std::fs::read("/usr/share/common-licenses/GPL-3").unwrap();
            same_counts(world, "gpl", &text);
        }),
        over_http("wordcount counts 10 MB as coreutils do", |world| {
            same_counts(world, "long", &fixtures::long_text());
        }),
        over_http("wordcount counts an empty text", |world| {
            let counts = same_counts(world, "empty", b"");
            assert_eq!(counts, json!({ "bytes": 0, "lines": 0, "words": 0, "top": [] }));
        }),
        over_http("wordcount counts bytes that are no UTF-8 as coreutils do", |world| {
            same_counts(world, "bytes", &fixtures::not_utf8());
        }),
    ]
}

fn same_counts(world: &World, name: &str, text: &[u8]) -> Value {
    let expected = by_other_means(world, name, text);
    let counts = world.api.post("/invoke/wordcount/", text).success();
    assert_eq!(counts, expected);
    counts
}

/// Words are runs of ASCII letters and digits, lower-cased; ten commonest first, ties by word.
fn by_other_means(world: &World, name: &str, text: &[u8]) -> Value {
    const SCRIPT: &str = r#"
        words() { { cat "$1"; echo; } | tr -cs 'A-Za-z0-9' '\n' | tr 'A-Z' 'a-z' | sed '/^$/d'; }
        wc -c <"$1"; wc -l <"$1"; words "$1" | wc -l
        words "$1" | sort | uniq -c | sort -k1,1nr -k2,2 | head -n 10"#;
    let file = world.file(&format!("{name}.txt"), text);
    let counted = cli::finish(Command::new("sh").env("LC_ALL", "C").args(["-c", SCRIPT, "sh"]).arg(file));
    assert_eq!(counted.code, 0, "{counted:?}");

    let number = |text: &str| text.trim().parse::<u64>().unwrap();
    let mut lines = counted.stdout.lines();
    let [bytes, newlines, words] = [(); 3].map(|()| number(lines.next().unwrap()));
    let top: Vec<_> = lines
        .map(|line| line.trim().split_once(' ').unwrap())
        .map(|(count, word)| json!([word, number(count)]))
        .collect();
    json!({ "bytes": bytes, "lines": newlines, "words": words, "top": top })
}
