//! The verbs of those who use a running server.

use super::{Case, on_the_host, over_http};
use crate::{fixtures, world::World};

pub(super) fn cases() -> Vec<Case> {
    vec![
        over_http("`stasis invoke` prints the function's answer", invoke),
        over_http("`stasis invoke` fails where the function does", invoke_fails),
        over_http("`stasis template list` shows the templates", list),
        over_http("building the same folder again changes nothing", unchanged),
        on_the_host("`stasis doctor` says a line per check", doctor),
    ]
}

fn invoke(world: &World) {
    let file = world.file("invoke.txt", "to be or not to be\n");
    let invoked = world.stasis.run(["invoke", "wordcount", "-d", &format!("@{}", file.display())]);
    assert_eq!(invoked.code, 0, "{invoked:?}");
    let counts: serde_json::Value = serde_json::from_str(&invoked.stdout).unwrap();
    let top = serde_json::json!([["be", 2], ["to", 2], ["not", 1], ["or", 1]]);
    assert_eq!((&counts["words"], &counts["top"]), (&6.into(), &top));
}

fn invoke_fails(world: &World) {
    let crashed = world.stasis.run(["invoke", "identity", "/crash", "-H", "X-Request-Id: e2e-cli"]);
    assert_eq!(crashed.code, 1, "{crashed:?}");
    assert!(crashed.stderr.contains("502") && crashed.stderr.contains("(request e2e-cli)"), "{crashed:?}");
    let unknown = world.stasis.run(["invoke", "no-such-template"]);
    assert_eq!(unknown.code, 1, "{unknown:?}");
    assert!(unknown.stderr.contains("/v1/templates"), "{unknown:?}");
}

fn list(world: &World) {
    let listed = world.stasis.run(["template", "list"]);
    assert_eq!(listed.code, 0, "{listed:?}");
    for name in ["wordcount", "identity"] {
        assert!(listed.stdout.lines().any(|line| line.split(' ').next() == Some(name)), "{listed:?}");
    }
}

fn unchanged(world: &World) {
    let built = world.stasis.run(["template", "build", fixtures::example("wordcount").to_str().unwrap()]);
    assert_eq!(built.code, 0, "{built:?}");
    assert!(built.stdout.starts_with("wordcount is unchanged"), "{built:?}");
}

fn doctor(world: &World) {
    let data = world.place("doctor");
    let arguments = ["doctor", "--data", data.to_str().unwrap()];
    let told = world.stasis.run(arguments);
    assert_eq!(told.code, 0, "{told:?}");
    let found = world.stasis.run(arguments.iter().chain(&["--json"]));
    assert_eq!(found.code, 0, "{found:?}");
    let findings: Vec<serde_json::Value> = serde_json::from_str(&found.stdout).unwrap();
    assert!(findings.len() >= 8, "{findings:?}");
    for finding in &findings {
        let (name, verdict) = (finding["name"].as_str().unwrap(), finding["verdict"].as_str().unwrap());
        assert!(told.stdout.lines().any(|line| line.contains(name)), "no line of {name} in {}", told.stdout);
        assert!(verdict == "ok" || finding["remedy"].is_string(), "what is to be done? {finding}");
    }
    assert!(!data.exists(), "a check left something");
}
