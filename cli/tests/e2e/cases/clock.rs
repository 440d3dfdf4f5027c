//! A snapshot's age does not reach the function.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{Case, over_http, templates};
use crate::{fixtures, world::World};

const HOUR: Duration = Duration::from_secs(3600);
/// What "right" means for a wall clock that was set by a message.
const TOLERANCE: Duration = Duration::from_secs(2);

pub(super) fn cases() -> Vec<Case> {
    vec![
        over_http("the monotonic clock does not count the time that a VM stands ready", standing),
        over_http("a function of an hour-old snapshot knows what time it is, and is gone once removed", an_hour_ago),
    ]
}

fn standing(world: &World) {
    let uptime = || world.api.get("/invoke/identity/").success()["monotonic"].as_f64().unwrap();
    let first = uptime();
    // Those that stand ready meanwhile let this time pass.
    world.api.get("/invoke/identity/sleep/20").success();
    let later: Vec<_> = (0..6).map(|_| uptime()).collect();
    assert!(later.iter().all(|uptime| (uptime - first).abs() < 10.0), "{first}, and 20 s later {later:?}");
}

fn an_hour_ago(world: &World) {
    let then = now() - HOUR;
    let target = format!("/v1/templates?clock_ns={}", then.as_nanos());
    let built = templates::build(&world.api, &target, &fixtures::identity_as("hour-old"));
    assert_eq!(built["created_at"], then.as_secs(), "the manifest's date");
    assert_eq!(world.api.get("/v1/templates/hour-old").success()["created_at"], then.as_secs());

    let before = now();
    let answer = world.api.get("/invoke/hour-old/");
    let after = now();
    let shown = Duration::from_secs_f64(answer.success()["time"].as_f64().unwrap());
    assert!(shown + TOLERANCE >= before && shown <= after + TOLERANCE, "{shown:?} is not in {before:?}..{after:?}");

    if let Some(server) = &world.server {
        let vm = answer.header("x-stasis-vm");
        let line = server.log.line("awake", |fields| fields["vm"] == vm);
        let certificate = line["certificate"].as_str().unwrap();
        let (_, rest) = certificate.split_once("clock_lag_ns: ").unwrap();
        let lag: u64 = rest.split([',', ' ']).next().unwrap().parse().unwrap();
        assert!(lag >= 3_500_000_000_000, "the guest's clock lagged by {lag} ns only: {certificate}");
    }
    templates::remove(world, "hour-old");
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap()
}
