//! Whoever asks something of a sandbox whose VM ends meanwhile is answered, with what it is then.

use stasis_pool_api::{Command, HeldBy, SandboxLogs};

use super::*;

/// Those made from now on answer nothing to whoever connects.
fn deaf(bench: &Bench) {
    *bench.fakes.agent.lock().unwrap() = Agent::Freezes;
}

/// Asks, until the sandbox's task has heard it.
async fn begun<T>(bench: &Bench, id: &str, asking: &mut (impl Future<Output = T> + Unpin)) {
    assert!(asking.now_or_never().is_none(), "it is answered");
    bench.show(id).await;
}

#[tokio::test]
async fn logs_of_one_that_goes_to_disk_meanwhile_are_what_is_known_then() {
    let bench = Bench::new().await;
    deaf(&bench);
    let id = bench.create("").await;
    let mut logs = bench.sandboxes.logs(&id);
    begun(&bench, &id, &mut logs).await;
    within(bench.sandboxes.pause(&id, PauseTo::Disk)).await.unwrap();
    assert_eq!(within(logs).await.unwrap(), SandboxLogs::default());
}

#[tokio::test]
async fn a_fork_of_one_that_goes_to_disk_meanwhile_names_the_state() {
    let bench = Bench::new().await;
    let id = bench.create("").await;
    bench.fakes.stuck.store(true, SeqCst);
    let mut fork = bench.sandboxes.fork(&id, 1, LIMIT);
    begun(&bench, &id, &mut fork).await;
    within(bench.sandboxes.pause(&id, PauseTo::Disk)).await.unwrap();
    let refused = within(fork).await.unwrap_err();
    let SandboxError::State { state, .. } = &refused else { panic!("{refused:?}") };
    assert!(matches!(state, State::Hibernating | State::Hibernated), "{refused}");
    assert!(refused.to_string().contains("it cannot be forked; possible now: resume"), "{refused}");
}

#[tokio::test]
async fn whoever_is_in_one_that_is_killed_hears_that_it_is_gone() {
    let bench = Bench::new().await;
    let id = bench.create("").await;
    let inside = within(bench.sandboxes.visit(&id, LIMIT)).await.unwrap();
    assert!(inside.lease.taken_back().is_none(), "nobody has ended it");
    within(bench.sandboxes.kill(&id)).await.unwrap();
    let Some(SandboxError::Gone { .. }) = inside.lease.taken_back() else { panic!("it is not told") };

    deaf(&bench);
    let id = bench.create("").await;
    let mut connecting = bench.sandboxes.visit(&id, LIMIT);
    begun(&bench, &id, &mut connecting).await;
    within(bench.sandboxes.kill(&id)).await.unwrap();
    let refused = within(connecting).await.unwrap_err();
    assert!(matches!(refused, SandboxError::Unknown { .. }), "{refused:?}");
}

#[tokio::test]
async fn whoever_is_cut_by_a_pause_hears_that_it_was_paused() {
    let bench = Bench::new().await;
    let id = bench.create("").await;
    let mut inside = within(bench.sandboxes.visit(&id, LIMIT)).await.unwrap();
    // The node brings all to disk before it ends: there is no grace.
    let cut = async move {
        let mut rest = Vec::new();
        inside.stream.read_to_end(&mut rest).await.unwrap();
        inside.lease.taken_back()
    };
    let (taken, ()) = within(async { tokio::join!(cut, bench.sandboxes.save()) }).await;
    assert!(matches!(taken, Some(SandboxError::Cut { .. })), "{taken:?}");
}

#[tokio::test]
async fn a_pause_to_disk_that_somebody_calls_off_is_no_failure_of_the_node() {
    let bench = Bench::new().await;
    let id = bench.create("").await;
    within(bench.sandboxes.pause(&id, PauseTo::Ram)).await.unwrap();
    bench.fakes.held.send_replace(true);
    let mut saving = bench.sandboxes.pause(&id, PauseTo::Disk);
    begun(&bench, &id, &mut saving).await;
    let mut visit = bench.sandboxes.visit(&id, LIMIT);
    begun(&bench, &id, &mut visit).await;
    bench.fakes.held.send_replace(false);
    within(visit).await.unwrap();
    let refused = within(saving).await.unwrap_err();
    assert!(matches!(refused, SandboxError::State { .. }), "{refused:?}");
    assert!(refused.to_string().contains("cannot be hibernated, since somebody has it resumed"), "{refused}");
}

#[tokio::test]
async fn a_guest_without_commands_is_named() {
    let bench = Bench::new().await;
    *bench.fakes.agent.lock().unwrap() = Agent::Bare;
    let id = bench.create("").await;
    let command = Command { command: vec!["ls".into()], ..Command::default() };
    let refused = within(bench.sandboxes.exec(&id, command, LIMIT)).await.unwrap_err();
    assert!(matches!(refused, SandboxError::NoExec { .. }), "{refused:?}");
    assert_eq!(bench.show(&id).await.commands, 0, "it is over");
}

#[tokio::test]
async fn one_whose_life_is_very_short_was_made_all_the_same_and_what_makes_no_sense_is_refused() {
    let bench = Bench::new().await;
    let make = async |more: &str| {
        let new = serde_json::from_str(&format!(r#"{{"template":"x",{more}}}"#)).unwrap();
        within(bench.sandboxes.create(new, LIMIT)).await
    };
    for _ in 0..20 {
        make(r#""timeout":"1ms""#).await.unwrap();
    }
    for bad in [r#""timeout":"1ns""#, r#""timeout":"0s""#, r#""idle":"1us""#, r#""hibernate_after":"366days""#] {
        let refused = make(bad).await.unwrap_err();
        assert!(matches!(&refused, SandboxError::Invalid { reason } if reason.contains("1ms to 365days")), "{bad}");
    }
}

#[tokio::test(start_paused = true)]
async fn one_that_is_busy_is_shown_as_it_was_written_down() {
    let bench = Bench::new().await;
    let [busy, quiet] = [bench.create("").await, bench.create("").await];
    within(bench.sandboxes.pause(&busy, PauseTo::Disk)).await.unwrap();
    // What follows a resume, the end of what was saved, is part of it.
    bench.fakes.stuck.store(true, SeqCst);
    let mut resuming = bench.sandboxes.resume(&busy, None);
    assert!((&mut resuming).now_or_never().is_none());
    let listed = within(async {
        loop {
            let listed = bench.sandboxes.list(None).await;
            if listed.iter().any(|info| info.busy) {
                return listed;
            }
        }
    })
    .await;
    let of = |id: &str| listed.iter().find(|info| info.id.as_str() == id).unwrap();
    assert_eq!((of(&busy).state, of(&busy).busy, &of(&busy).idle), (State::Running, true, &None));
    assert_eq!((of(&quiet).state, of(&quiet).busy), (State::Running, false));
    let shown = bench.show(&busy).await;
    assert_eq!((shown.state, shown.busy, shown.pid), (State::Running, true, None));
}

#[tokio::test]
async fn each_thing_that_keeps_it_awake_is_named() {
    let bench = Bench::new().await;
    let id = bench.create(r#","idle":"1h""#).await;
    let idle = async || bench.show(&id).await.idle.unwrap();
    let quiet = idle().await;
    let (since, will_pause_at) = (quiet.idle_since.unwrap(), quiet.will_pause_at.unwrap());
    assert_eq!((will_pause_at, quiet.held_by.len()), (since.plus(Duration::from_secs(3600)), 0));

    let visit = within(bench.sandboxes.visit(&id, LIMIT)).await.unwrap();
    let command = Command { command: vec!["sleep".into()], ..Command::default() };
    let events = within(bench.sandboxes.exec(&id, command, LIMIT)).await.unwrap();
    let held = idle().await;
    assert_eq!((held.idle_since, held.will_pause_at), (None, None));
    assert_eq!(held.held_by, [HeldBy::Requests(1), HeldBy::Commands(1)]);
    drop(visit);
    assert_eq!(idle().await.held_by, [HeldBy::Commands(1)]);
    drop(events);
    within(async {
        while idle().await.idle_since.is_none() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(idle().await.idle_since.unwrap() >= since, "anew since the last of them");

    for (name, lasts) in [("ci", None), ("me", Some(Duration::from_secs(7200)))] {
        within(bench.sandboxes.hold(&id, name.parse().unwrap(), lasts)).await.unwrap();
    }
    let held = idle().await;
    let [HeldBy::Hold { name, until: None }, HeldBy::Hold { name: mine, until: Some(until) }] = &held.held_by[..]
    else {
        panic!("{held:?}")
    };
    assert_eq!((name.as_str(), mine.as_str(), held.will_pause_at), ("ci", "me", None));
    assert!(held.idle_since.is_some(), "held, but idle");
    within(bench.sandboxes.release(&id, "ci".parse().unwrap())).await.unwrap();
    assert_eq!(idle().await.will_pause_at, Some(*until), "when the last hold ends");
    assert_eq!(bench.show(&id).await.next.map(|next| next.what), Some(NextKind::Kill), "its deadline is sooner");
}
