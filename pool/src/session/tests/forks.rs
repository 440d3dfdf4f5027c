//! Children of a sandbox, and makers who leave before they are told.

use super::*;

#[tokio::test]
async fn it_has_all_the_children_that_were_asked_for_or_none() {
    let bench = Bench::new().await;
    let id = bench.create(r#","metadata":{"a":"b"}"#).await;
    let fork = async |count| within(bench.sandboxes.fork(&id, count, LIMIT)).await;
    let children = fork(3).await.unwrap();
    let ids: HashSet<_> = children.iter().map(|child| child.id.clone()).collect();
    assert_eq!(ids.len(), 3);
    let parent = bench.show(&id).await;
    for child in &children {
        assert_eq!((child.state, &child.metadata), (State::Running, &parent.metadata));
        let certificate = child.certificate.as_ref().unwrap();
        assert_eq!(certificate["generation"], 2, "above the parent's");
        assert_ne!(certificate["machine_id"], parent.certificate.as_ref().unwrap()["machine_id"]);
    }
    assert_eq!(parent.certificate.unwrap()["generation"], 1, "which lives on");

    let free = bench.free_mib();
    let refused = fork(3).await.unwrap_err();
    assert!(matches!(refused, SandboxError::NotDone { wanted: "start", .. }), "{refused:?}");
    assert_eq!(
        (bench.free_mib(), within(bench.sandboxes.list(None)).await.len()),
        (free, 4),
        "not even the two that came to be"
    );
    for count in [0, 101] {
        assert!(matches!(fork(count).await, Err(SandboxError::Invalid { .. })));
    }
    within(bench.sandboxes.pause(&id, PauseTo::Ram)).await.unwrap();
    let refused = fork(1).await.unwrap_err().to_string();
    assert!(refused.contains("is suspended: it cannot be forked"), "{refused}");
}

#[tokio::test]
async fn of_what_its_maker_was_not_told_nothing_stays() {
    let bench = Bench::new().await;
    bench.fakes.held.send_replace(true);
    let new: NewSandbox = serde_json::from_str(r#"{"template":"x"}"#).unwrap();
    let mut making = bench.sandboxes.create(new, LIMIT);
    assert!(tokio::time::timeout(Duration::from_millis(50), &mut making).await.is_err());
    assert_eq!(bench.sandboxes.list(None).await.len(), 1);
    drop(making);
    bench.fakes.held.send_replace(false);
    within(async {
        while !bench.sandboxes.read().is_empty() || bench.free_mib() < 1000 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(Place::all(bench.fakes.world.vms()).unwrap().is_empty());
}
