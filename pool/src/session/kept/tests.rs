//! With processes that are no VMs: who is found again, and who is ended.

use super::*;
use crate::{
    session::{Orphan, count_orphans, end_orphans, orphans, tests::fakes::guest},
    vmm::tests::{MACHINE, Mute},
};

/// A process, written down below `root` as `holder` makes it.
async fn left(root: &Path, spawner: &Spawner, holder: impl FnOnce(Holder) -> Holder) -> (Vmm, Place) {
    let nothing = Admission::new(1 << 30).reserve(0).unwrap();
    let (vmm, _) = Vmm::spawn(spawner, &MACHINE, nothing).await.unwrap();
    let place = Place::make(root).unwrap();
    note(&place, &holder(vmm.holder().clone()), guest()).unwrap();
    (vmm, place)
}

#[tokio::test]
async fn one_that_lives_is_found_with_what_it_holds_and_what_is_left_of_others_is_removed() {
    let mute = Mute::new();
    let Some(earlier) = mute.spawner() else { return };
    let root = tempfile::tempdir().unwrap();
    let (vmm, place) = left(root.path(), &earlier, |holder| holder).await;
    let (other, _) = left(root.path(), &earlier, |mut holder| {
        holder.process.started -= 1; // an earlier one with the same id
        holder
    })
    .await;
    Place::make(root.path()).unwrap();

    let (spawner, admission) = (mute.spawner().unwrap(), Admission::new(1000 << 20));
    let mut found = all_below(root.path(), &spawner, &admission).unwrap();
    assert_eq!(Place::all(root.path()).unwrap().iter().map(Place::path).collect::<Vec<_>>(), [place.path()]);
    assert_eq!(found.len(), 1);
    assert_eq!((spawner.free_uids(), admission.available_mib() < 1000), (4095, true), "its uid and memory are its own");
    let survivor = found.remove(0);
    assert!(survivor.is(vmm.process()) && !survivor.is(other.process()));

    survivor.end(&spawner).await.unwrap();
    vmm.ended().await;
    assert!(find(vmm.process()).unwrap().is_none(), "it lives");
    assert!(find(other.process()).unwrap().is_some(), "another was taken for it");
    assert_eq!(
        (Place::all(root.path()).unwrap().len(), spawner.free_uids(), admission.available_mib()),
        (0, 4096, 1000)
    );
}

#[tokio::test]
async fn one_that_does_not_answer_is_ended_and_one_that_is_not_understood_is_left() {
    let mute = Mute::new();
    let Some(earlier) = mute.spawner() else { return };
    let root = tempfile::tempdir().unwrap();
    let (silent, _) = left(root.path(), &earlier, |holder| holder).await;
    let (foreign, place) = left(root.path(), &earlier, |holder| holder).await;
    place.write(foreign.holder()).unwrap(); // and nothing of its guest

    let (spawner, admission) = (mute.spawner().unwrap(), Admission::new(1000 << 20));
    let mut found = all_below(root.path(), &spawner, &admission).unwrap();
    found.sort_by_key(|survivor| survivor.is(foreign.process()));
    let (unknown, fault) = (found.remove(1), "what was written down of it cannot be read");
    assert!(unknown.is(foreign.process()) && unknown.fault().is_some_and(|why| why.starts_with(fault)), "{unknown:?}");
    assert!(find(foreign.process()).unwrap().is_some(), "it was ended");
    // Nobody listens at its socket, since there is none.
    let never = std::future::pending();
    let error = found.remove(0).adopt(&spawner, never).await.unwrap_err().1;
    assert!(found.is_empty() && error.to_string().contains("cannot be reached"), "{error}");
    silent.ended().await;
    assert!(find(silent.process()).unwrap().is_none(), "it lives");
    unknown.adopt(&spawner, std::future::ready(())).await.unwrap_err();
    foreign.ended().await;
    assert!(find(foreign.process()).unwrap().is_none(), "it lives");
    assert_eq!((Place::all(root.path()).unwrap().len(), admission.available_mib()), (0, 1000));
}

#[tokio::test]
async fn one_of_which_nothing_can_be_read_is_left_while_it_lives() {
    let mute = Mute::new();
    let Some(spawner) = mute.spawner() else { return };
    let root = tempfile::tempdir().unwrap();
    let place = Place::make(root.path()).unwrap();
    place.write(&"no papers").unwrap();
    let listener = place.listen().unwrap();
    let found = || all_below(root.path(), &spawner, &Admission::new(1000 << 20)).unwrap().len();
    assert_eq!((found(), Place::all(root.path()).unwrap().len()), (0, 1));
    drop(listener);
    assert_eq!((found(), Place::all(root.path()).unwrap().len()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn one_that_never_answers_is_not_waited_for_for_ever() {
    let root = tempfile::tempdir().unwrap();
    let place = Place::make(root.path()).unwrap();
    // As of a process that is stopped: the kernel takes the connection, and nobody speaks.
    let _listener = place.listen().unwrap();
    let error = Vmm::greet(&place).await.unwrap_err();
    assert!(error.to_string().contains("has not answered its next owner within 60s"), "{error}");
}

#[tokio::test]
async fn those_of_a_node_that_has_no_successor_are_ended_at_once() {
    let mute = Mute::new();
    let Some(spawner) = mute.spawner() else { return };
    let data = tempfile::tempdir().unwrap();
    assert_eq!(end_orphans(data.path()).unwrap(), 0);
    let root = data.path().join(VMS);
    fs::create_dir(&root).unwrap();
    let (vmm, _) = left(&root, &spawner, |holder| holder).await;
    assert_eq!(count_orphans(data.path()).unwrap(), 1);
    assert_eq!(orphans(data.path()).await.unwrap(), [Orphan { pid: vmm.pid(), sandbox: None }]);
    assert_eq!(end_orphans(data.path()).unwrap(), 1);
    assert!(find(vmm.process()).unwrap().is_none(), "it lives");
    assert!(Place::all(&root).unwrap().is_empty());
    assert_eq!((end_orphans(data.path()).unwrap(), count_orphans(data.path()).unwrap()), (0, 0));
}

#[tokio::test]
async fn one_of_which_nothing_can_be_read_keeps_nobody_from_ending_the_others() {
    let mute = Mute::new();
    let Some(spawner) = mute.spawner() else { return };
    let data = tempfile::tempdir().unwrap();
    let root = data.path().join(VMS);
    fs::create_dir(&root).unwrap();
    let mut all = Vec::new();
    for _ in 0..4 {
        all.push(left(&root, &spawner, |holder| holder).await);
    }
    let (damaged, place) = all.pop().unwrap();
    let _listener = place.listen().unwrap();
    place.write(&"nothing that makes sense").unwrap();
    assert_eq!((count_orphans(data.path()).unwrap(), orphans(data.path()).await.unwrap().len()), (4, 3));
    end_orphans(data.path()).unwrap_err();
    assert!(all.iter().all(|(vmm, _)| find(vmm.process()).unwrap().is_none()), "one lives");
    assert!(find(damaged.process()).unwrap().is_some(), "of it nothing is known");
    assert_eq!(Place::all(&root).unwrap().len(), 1);
}

#[tokio::test]
async fn one_of_which_nothing_can_be_read_is_ended_by_the_process_that_a_record_names() {
    let mute = Mute::new();
    let Some(earlier) = mute.spawner() else { return };
    let root = tempfile::tempdir().unwrap();
    let (damaged, place) = left(root.path(), &earlier, |holder| holder).await;
    place.write(&"nothing that makes sense").unwrap();
    let listener = place.listen().unwrap();
    let (lost, nowhere) = left(root.path(), &earlier, |holder| holder).await;
    nowhere.remove();

    let (spawner, admission) = (mute.spawner().unwrap(), Admission::new(1000 << 20));
    let survivors = Survivors::find(root.path(), &spawner, &admission).unwrap();
    let [process, other] = [damaged.process(), lost.process()];
    survivors.end(process).await.unwrap();
    assert!(find(process).unwrap().is_some(), "no record names it yet");
    for process in [process, other] {
        assert!(survivors.fault(process).unwrap().contains("cannot be read"));
    }
    survivors.end_the_rest(vec![process, other]).await;
    assert!(find(process).unwrap().is_some() && find(other).unwrap().is_some(), "one was ended");
    assert_eq!(survivors.left().len(), 2, "a node that leaves tells of them");
    // As its process does, which is none here that listens.
    drop(listener);
    for process in [process, other] {
        survivors.end(process).await.unwrap();
        assert!(find(process).unwrap().is_none(), "it lives");
    }
    assert!(Place::all(root.path()).unwrap().is_empty() && survivors.leave().is_empty());
    assert_eq!(survivors.fault(process), None);
}

#[tokio::test]
async fn one_that_cannot_be_ended_keeps_what_it_holds() {
    let mute = Mute::new();
    let Some(earlier) = mute.spawner() else { return };
    let root = tempfile::tempdir().unwrap();
    let (vmm, place) = left(root.path(), &earlier, |holder| holder).await;
    let (spawner, admission) = (mute.spawner().unwrap(), Admission::new(1000 << 20));
    let survivors = Survivors::find(root.path(), &spawner, &admission).unwrap();
    // What is no process cannot be ended.
    let other = OwnedFd::from(fs::File::open("/dev/null").unwrap());
    let handle = std::mem::replace(&mut survivors.left()[0].handle, other);
    let (free, uids) = (admission.available_mib(), spawner.free_uids());
    let process = vmm.process();
    let is_kept = || {
        assert_eq!((admission.available_mib(), spawner.free_uids()), (free, uids));
        assert!(place.path().exists() && survivors.left().len() == 1);
    };
    let never = std::future::pending();
    let error = survivors.adopt(process, never).await.unwrap_err();
    assert!(matches!(&error, MachineError::Lives { why, .. } if why.contains("cannot be reached")), "{error}");
    is_kept();
    survivors.end(process).await.unwrap_err();
    is_kept();
    survivors.end_the_rest(Vec::new()).await;
    is_kept();
    survivors.left()[0].handle = handle;
    survivors.end(process).await.unwrap();
    assert_eq!((admission.available_mib(), spawner.free_uids()), (1000, 4096));
    assert!(!place.path().exists() && find(process).unwrap().is_none());
}
