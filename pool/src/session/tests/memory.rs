//! Who is suspended gives up memory: after a while, and as soon as somebody needs it.

use super::*;
use crate::node::spare;

#[tokio::test]
async fn a_claim_that_needs_memory_has_it_of_one_that_is_suspended_which_then_answers_again() {
    // Room for two of 72 MiB.
    let bench = Bench::with(World::new(Handle::current()), 150).await;
    let sparing = tokio::spawn(spare(bench.fakes.admission.shortages(), Arc::new(bench.sandboxes.clone())));
    let suspended = [bench.create("").await, bench.create("").await];
    for id in &suspended {
        within(bench.sandboxes.pause(id, PauseTo::Ram)).await.unwrap();
    }
    let third = bench.create("").await;
    let mut states = [bench.show(&suspended[0]).await.state, bench.show(&suspended[1]).await.state];
    states.sort_unstable();
    assert_eq!(states, [State::Suspended, State::Hibernated], "one of them was enough");

    // Each resume needs what the other has.
    within(bench.sandboxes.kill(&third)).await.unwrap();
    for id in suspended.iter().chain(&suspended) {
        let mut visit = within(bench.sandboxes.visit(id, LIMIT)).await.unwrap();
        let mut said = [0; 5];
        within(visit.stream.read_exact(&mut said)).await.unwrap();
        drop(visit);
        within(bench.sandboxes.pause(id, PauseTo::Ram)).await.unwrap();
        drop(bench.create("").await);
        let newest = bench.sandboxes.list(Some(State::Running)).await;
        for one in newest {
            within(bench.sandboxes.kill(one.id.as_str())).await.unwrap();
        }
    }
    sparing.abort();
}

#[tokio::test]
async fn nobody_is_brought_to_disk_while_there_is_memory() {
    let bench = Bench::new().await;
    let sparing = tokio::spawn(spare(bench.fakes.admission.shortages(), Arc::new(bench.sandboxes.clone())));
    let id = bench.create(r#","hibernate_after":"0s""#).await;
    within(bench.sandboxes.pause(&id, PauseTo::Ram)).await.unwrap();
    bench.create("").await;
    let shown = bench.show(&id).await;
    assert_eq!((shown.state, shown.next), (State::Suspended, None));
    sparing.abort();
}

#[tokio::test]
async fn one_that_is_suspended_for_long_goes_to_disk_by_itself() {
    let bench = Bench::new().await;
    let id = bench.create(r#","hibernate_after":"1h""#).await;
    let paused = within(bench.sandboxes.pause(&id, PauseTo::Ram)).await.unwrap();
    let next = paused.next.unwrap();
    assert_eq!((next.what, next.at), (NextKind::Hibernate, paused.entered_at.plus(Duration::from_secs(3600))));
    let id = bench.create(r#","hibernate_after":"20ms""#).await;
    within(bench.sandboxes.pause(&id, PauseTo::Ram)).await.unwrap();
    bench.until(&id, State::Hibernated).await;
    assert_eq!(within(bench.sandboxes.visit(&id, LIMIT)).await.unwrap().start, StartKind::Resumed);
    assert_eq!(bench.fakes.restored.load(SeqCst), 1, "from disk");
}
