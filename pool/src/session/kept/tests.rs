//! With processes that are no VMs: who is found again, and who is ended.

use super::*;
use crate::{
    session::tests::fakes::guest,
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
    let mut found = survivors(root.path(), &spawner, &admission).unwrap();
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
async fn one_that_does_not_answer_or_is_not_understood_is_ended() {
    let mute = Mute::new();
    let Some(earlier) = mute.spawner() else { return };
    let root = tempfile::tempdir().unwrap();
    let (silent, _) = left(root.path(), &earlier, |holder| holder).await;
    let (foreign, place) = left(root.path(), &earlier, |holder| holder).await;
    place.write(foreign.holder()).unwrap(); // and nothing of its guest

    let (spawner, admission) = (mute.spawner().unwrap(), Admission::new(1000 << 20));
    let mut found = survivors(root.path(), &spawner, &admission).unwrap();
    foreign.ended().await;
    // Nobody listens at its socket, since there is none.
    let error = found.remove(0).adopt(&spawner).await.unwrap_err();
    assert!(found.is_empty() && error.to_string().contains("cannot be reached"), "{error}");
    silent.ended().await;
    assert!(find(silent.process()).unwrap().is_none(), "it lives");
    assert_eq!((Place::all(root.path()).unwrap().len(), admission.available_mib()), (0, 1000));
}

#[tokio::test]
async fn those_of_a_node_that_has_no_successor_are_ended_at_once() {
    let mute = Mute::new();
    let Some(spawner) = mute.spawner() else { return };
    let data = tempfile::tempdir().unwrap();
    assert_eq!(end_kept(data.path()).unwrap(), 0);
    let root = data.path().join(VMS);
    fs::create_dir(&root).unwrap();
    let (vmm, _) = left(&root, &spawner, |holder| holder).await;
    assert_eq!(end_kept(data.path()).unwrap(), 1);
    assert!(find(vmm.process()).unwrap().is_none(), "it lives");
    assert!(Place::all(&root).unwrap().is_empty());
    assert_eq!(end_kept(data.path()).unwrap(), 0);
}
