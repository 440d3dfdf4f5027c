//! Commands in a sandbox.

use stasis_pool_api::{Command, CommandEvent, CommandEvents, HeldBy, SandboxLogs, Written};

use super::*;

impl Bench {
    async fn exec(&self, id: &str, name: &str, stdin: &str) -> CommandEvents {
        let command = Command { command: vec![name.into()], stdin: stdin.into(), ..Command::default() };
        within(self.sandboxes.exec(id, command, LIMIT)).await.unwrap()
    }
}

#[tokio::test]
async fn its_output_and_its_end_are_told_and_it_resumes_the_sandbox() {
    let bench = Bench::new().await;
    let id = bench.create("").await;
    for (to, _) in PAUSES {
        within(bench.sandboxes.pause(&id, to)).await.unwrap();
        let mut events = bench.exec(&id, "echo", "words").await;
        let told = [within(events.recv()).await, within(events.recv()).await, within(events.recv()).await];
        let said = CommandEvent::Stdout(Written("words".into()));
        assert_eq!(told, [Some(said), Some(CommandEvent::Exited { status: 0 }), None]);
    }
    assert_eq!(bench.show(&id).await.commands, 0);
}

#[tokio::test]
async fn it_keeps_the_sandbox_awake_until_whoever_listens_leaves() {
    let bench = Bench::new().await;
    let id = bench.create(r#","idle":"1ms""#).await;
    let mut events = bench.exec(&id, "sleep", "").await;
    assert_eq!(within(events.recv()).await, Some(CommandEvent::Stderr(Written("sleep".into()))));
    let info = bench.show(&id).await;
    assert_eq!((info.state, info.requests, info.commands), (State::Running, 0, 1));
    assert!(info.idle.unwrap().held_by.contains(&HeldBy::Commands(1)));
    drop(events);
    bench.until(&id, State::Suspended).await;
}

#[tokio::test]
async fn a_pause_by_hand_or_a_kill_ends_it() {
    let bench = Bench::new().await;
    let id = bench.create("").await;
    let mut events = bench.exec(&id, "sleep", "").await;
    within(events.recv()).await.unwrap();
    within(bench.sandboxes.kill(&id)).await.unwrap();
    assert!(matches!(within(events.recv()).await, Some(CommandEvent::Lost { .. })));
}

#[tokio::test]
async fn logs_do_not_resume_it() {
    let bench = Bench::new().await;
    let id = bench.create("").await;
    let logs = |output: Option<&str>, console: Option<&str>| {
        let [output, console] = [output, console].map(|text| text.map(str::to_owned));
        SandboxLogs { output, console }
    };
    assert_eq!(within(bench.sandboxes.logs(&id)).await.unwrap(), logs(Some("ready"), Some("last words")));
    within(bench.sandboxes.pause(&id, PauseTo::Ram)).await.unwrap();
    assert_eq!(within(bench.sandboxes.logs(&id)).await.unwrap(), logs(None, Some("last words")));
    within(bench.sandboxes.pause(&id, PauseTo::Disk)).await.unwrap();
    assert_eq!(within(bench.sandboxes.logs(&id)).await.unwrap(), SandboxLogs::default());
    assert_eq!(bench.show(&id).await.state, State::Hibernated);
    assert!(within(bench.sandboxes.logs("sb-0")).await.is_err());
}

#[tokio::test]
async fn one_that_names_no_program_is_refused() {
    let bench = Bench::new().await;
    let id = bench.create("").await;
    let refused = within(bench.sandboxes.exec(&id, Command::default(), LIMIT)).await;
    assert!(matches!(refused, Err(SandboxError::Invalid { reason }) if reason.contains("command")));
}

#[tokio::test(start_paused = true)]
async fn one_whose_time_is_over_before_it_was_answered_says_whether_it_may_have_run() {
    let bench = Bench::new().await;
    *bench.fakes.agent.lock().unwrap() = Agent::Freezes;
    let id = bench.create("").await;
    let run = async |id: &str| {
        let command = Command { command: vec!["echo".into()], ..Command::default() };
        within(bench.sandboxes.exec(id, command, Duration::from_secs(5))).await.err().unwrap()
    };
    // Its guest was told, and says nothing.
    let untold = run(&id).await;
    assert!(matches!(untold, SandboxError::MayHaveRun { .. }), "{untold}");
    within(bench.sandboxes.kill(&id)).await.unwrap();
    // Or it breaks off.
    *bench.fakes.agent.lock().unwrap() = Agent::HangsUp;
    let id = bench.create("").await;
    let broken = run(&id).await;
    assert!(matches!(broken, SandboxError::MayHaveRun { .. }), "{broken}");
    within(bench.sandboxes.kill(&id)).await.unwrap();

    *bench.fakes.agent.lock().unwrap() = Agent::Honest;
    let id = bench.create("").await;
    within(bench.sandboxes.pause(&id, PauseTo::Disk)).await.unwrap();
    bench.fakes.held.send_replace(true);
    let late = run(&id).await;
    assert!(matches!(late, SandboxError::Late { .. }), "it was not told: {late}");
    bench.fakes.held.send_replace(false);
    assert_eq!(bench.until(&id, State::Running).await.commands, 0);
}
