use super::*;

const MIB: u64 = 1 << 20;
/// No test may hang.
const LIMIT: Duration = Duration::from_secs(60);

async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, work).await.expect("it hangs")
}

/// Waits until so many bytes are waited for.
async fn until_waited_for(node: &Admission, bytes: u64) {
    within(async {
        while node.capacity().0.waited_for != bytes {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

fn template(memory_bytes: u64) -> TemplateInfo {
    TemplateInfo { memory_bytes, ..crate::template::tests::info("name='x'\ncommand='y'\nmemory='64MiB'") }
}

fn node(memory_mib: u64) -> Admission {
    Admission::with(memory_mib * MIB, Cores { count: 2, overcommit: 1 })
}

#[test]
fn memory_is_promised_once_and_its_return_is_heard_of() {
    let node = Admission::new(600 * MIB);
    let mut releases = node.changes();
    let first = node.reserve(256).unwrap();
    let second = node.reserve(256).unwrap();
    let refusal = node.reserve(256).unwrap_err().what;
    assert_eq!((refusal.needed, refusal.available, refusal.limit), (264 * MIB, 72 * MIB, 600 * MIB));
    assert!(!releases.has_changed().unwrap());
    drop(first);
    assert!(releases.has_changed().unwrap());
    releases.mark_unchanged();
    drop(node.reserve(256).unwrap());
    drop(second);
    assert_eq!(node.available_mib(), 600);
}

#[tokio::test]
async fn a_paused_vm_costs_what_it_is_expected_to_write_and_all_before_it_runs() {
    let (node, info) = (node(200), template(20 * MIB));
    let (paused, running) = (Charge::paused(&info, Some(8 * MIB)), Charge::running(&info));
    let vms: Vec<_> = (0..3).map(|_| node.admit(paused.clone()).unwrap()).collect();
    // 10 + 8 each, and the image.
    assert_eq!(node.available_mib(), 200 - 3 * 18 - 20);
    let promises: Vec<_> = vms.iter().map(Reservation::promise).collect();
    promises[0].change(&running).unwrap();
    promises[1].change(&running).unwrap();
    let (memory, vcpus) = node.capacity();
    assert_eq!((memory.committed, memory.expected_dirty, memory.shared), (144 * MIB, 18 * MIB, 20 * MIB));
    assert_eq!((memory.free, vcpus.committed, vcpus.free), (18 * MIB, 2, 0));
    let refused = promises[2].change(&running).unwrap_err().what;
    assert_eq!((refused.resource, refused.needed, refused.available), (Resource::Memory, 54 * MIB, 18 * MIB));

    // It waits, and gets what comes free; nobody who starts something new does.
    let third = promises[2].clone();
    let wanted = running.clone();
    promises[0].becomes(&paused);
    let waiting =
        tokio::spawn(async move { third.change_until(&wanted, &mut None, Instant::now() + LIMIT, || false).await });
    until_waited_for(&node, 54 * MIB).await;
    assert!(node.admit(paused.clone()).is_err());
    promises[0].change(&paused).unwrap();
    within(waiting).await.unwrap().unwrap();
    drop(vms);
    assert_eq!(node.available_mib(), 200);
    promises[0].change(&running).unwrap();
    assert_eq!(node.available_mib(), 200, "what was given back stays so");
}

#[tokio::test]
async fn vcpus_are_refused_by_name_and_nobody_is_asked_to_spare_memory_for_them() {
    let (node, info) = (node(10_000), template(0));
    let shortages = node.shortages_of_memory();
    let _two = [node.admit(Charge::running(&info)).unwrap(), node.admit(Charge::running(&info)).unwrap()];
    let refused = within(node.admit_returning(Charge::running(&info), None)).await.unwrap_err().what;
    assert_eq!((refused.resource, refused.needed, refused.available, refused.limit), (Resource::Vcpus, 1, 0, 2));
    assert!(!shortages.has_changed().unwrap());
    assert!(node.admit(Charge::paused(&info, None)).is_ok(), "one that stands ready uses none");
}

#[tokio::test]
async fn when_it_closes_all_comes_back_and_nothing_more_goes_out() {
    let node = node(1000);
    let held = node.reserve(64).unwrap();
    let closing = tokio::spawn({
        let node = node.clone();
        async move { node.all_returned().await }
    });
    while node.reserve(1).is_ok() {
        tokio::task::yield_now().await;
    }
    drop(held);
    within(closing).await.unwrap();
}

#[test]
fn the_sums_are_shown_as_they_are() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let _here = ::metrics::set_default_local_recorder(&recorder);
    let (node, info) = (node(200), template(20 * MIB));
    let _paused = node.admit(Charge::paused(&info, Some(8 * MIB))).unwrap();
    let _running = node.admit(Charge::running(&info)).unwrap();
    assert!(node.reserve(1000).is_err());
    metrics::life_wrote(&info.spec.name, 4096);
    let shown = recorder.handle().render();
    for line in [
        "stasis_node_memory_limit_bytes 209715200",
        "stasis_node_memory_committed_bytes 75497472",
        "stasis_node_memory_expected_dirty_bytes 18874368",
        "stasis_node_memory_shared_bytes 20971520",
        "stasis_node_vcpus_limit 2",
        "stasis_node_vcpus_committed 1",
        "stasis_admission_refused_total{resource=\"memory\"} 1",
        "stasis_vm_dirty_bytes_count{template=\"x\"} 1",
        "stasis_vm_dirty_bytes_sum{template=\"x\"} 4096",
    ] {
        assert!(shown.lines().any(|one| one == line), "no {line} in:\n{shown}");
    }
}

#[test]
fn a_vm_that_lives_has_its_memory_even_if_the_node_has_less() {
    let node = node(100);
    let living: Vec<_> = (0..2).map(|_| node.admit_living(Charge::alone(256, 2))).collect();
    assert_eq!(node.available_mib(), 0);
    assert!(node.reserve(1).is_err());
    drop(living);
    assert_eq!((node.available_mib(), node.capacity().1.committed), (100, 0));
}

/// Somebody who waits for room for a process with 64 MiB, however long that takes.
fn waits(node: &Admission) -> tokio::task::JoinHandle<Result<Reservation, Full>> {
    let node = node.clone();
    tokio::spawn(async move { node.admit_returning(Charge::process(64), None).await })
}

#[tokio::test]
async fn who_lacks_what_is_on_its_way_back_waits_until_that_has_come_or_does_not_come() {
    let node = node(2 * 72);
    let vms: Vec<_> = (0..2).map(|_| node.reserve(64).unwrap()).collect();
    let refused = within(waits(&node)).await.unwrap().unwrap_err();
    assert_eq!((refused.what.needed, refused.what.available, refused.missing), (72 * MIB, 0, 72 * MIB));

    vms[0].promise().is_leaving();
    assert_eq!(node.capacity().0.returning, 72 * MIB);
    let first = waits(&node);
    until_waited_for(&node, 72 * MIB).await;
    let second = within(waits(&node)).await.unwrap();
    assert!(second.is_err(), "what comes back is the first one's");
    // It is not given up after all.
    vms[0].promise().stays();
    assert!(within(first).await.unwrap().is_err());

    vms[0].promise().is_leaving();
    let first = waits(&node);
    until_waited_for(&node, 72 * MIB).await;
    vms[1].promise().is_leaving();
    let second = waits(&node);
    until_waited_for(&node, 2 * 72 * MIB).await;
    // Whoever leaves the line is not waited behind.
    first.abort();
    drop(vms);
    let had = within(second).await.unwrap().unwrap();
    assert_eq!(node.available_mib(), 72);
    drop(had);
}

#[tokio::test]
async fn in_the_line_who_comes_first_is_served_first() {
    let node = node(2 * 72);
    let vms: Vec<_> = (0..2).map(|_| node.reserve(64).unwrap()).collect();
    vms.iter().for_each(|vm| vm.promise().is_leaving());
    let big = {
        let node = node.clone();
        tokio::spawn(async move { node.admit_returning(Charge::process(2 * 64), None).await })
    };
    until_waited_for(&node, 136 * MIB).await;
    let mut vms = vms.into_iter();
    drop(vms.next());
    assert!(node.reserve(64).is_err() && !big.is_finished(), "half of what the first one waits for is there");
    drop(vms.next());
    within(big).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn when_to_try_again_is_what_is_missing_by_the_rate_at_which_it_comes_back() {
    let node = node(72);
    let when = |node: &Admission| node.reserve(64).unwrap_err().retry_after;
    let held = node.reserve(64).unwrap();
    assert_eq!(when(&node), LATEST, "nothing has come back yet");
    drop(held);
    for _ in 0..100 {
        drop(node.reserve(64).unwrap());
        tokio::time::advance(Duration::from_secs(4)).await;
    }
    let _held = node.reserve(64).unwrap();
    let rate = node.capacity().0.returned_per_s / (72 * MIB) as f64;
    assert!((0.2..0.27).contains(&rate), "every four seconds, but {rate}");
    assert!((4..=5).contains(&when(&node).as_secs()), "{:?}", when(&node));
    let rule = Admission::retry_rule();
    assert_eq!((rule.lately_s, rule.min_s, rule.max_s), (30, 1, 30));
}
