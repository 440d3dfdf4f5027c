//! Every command in every state: it is taken, or refused with the state and with what would be taken.

use stasis_pool_api::{Command, allowed_of_sandbox};

use super::*;

/// All of one that does not resume by itself. One that is gone is unknown.
const STATES: [State; 9] = [
    State::Creating,
    State::Running,
    State::Pausing,
    State::Suspended,
    State::Hibernating,
    State::Hibernated,
    State::Resuming,
    State::Failed,
    State::Killing,
];

/// By the words that refusals use, where they have one.
const COMMANDS: [&str; 11] =
    ["requests", "commands", "pause", "pause to disk", "resume", "fork", "timeout", "hold", "release", "logs", "kill"];

/// Longer than anything takes that happens at all: the clock runs only while nothing does.
const NOTHING_HAPPENS: Duration = Duration::from_secs(1);

/// A sandbox that stays in this state as long as nobody has it changed.
async fn in_state(state: State) -> (Bench, String) {
    let bench = Bench::new().await;
    let new = r#","auto_resume":false"#;
    let begin = |work: BoxFuture<'static, ()>| drop(tokio::spawn(work));
    if state == State::Creating {
        bench.fakes.held.send_replace(true);
        let (sandboxes, new) = (bench.sandboxes.clone(), format!(r#"{{"template":"x"{new}}}"#));
        begin(async move { drop(sandboxes.create(serde_json::from_str(&new).unwrap(), LIMIT).await) }.boxed());
        let begun = std::time::Instant::now();
        loop {
            assert!(begun.elapsed() < LIMIT, "it is not listed");
            if let [info] = &bench.sandboxes.list(None).await[..] {
                return (bench, info.id.to_string());
            }
            tokio::task::yield_now().await;
        }
    }
    let agent = if state == State::Pausing { Agent::StopsLate } else { Agent::Honest };
    *bench.fakes.agent.lock().unwrap() = agent;
    let id = bench.create(new).await;
    let (sandboxes, it) = (bench.sandboxes.clone(), id.clone());
    let pause = async |to| drop(within(bench.sandboxes.pause(&id, to)).await.unwrap());
    match state {
        State::Pausing => begin(async move { drop(sandboxes.pause(&it, PauseTo::Ram).await) }.boxed()),
        State::Suspended => pause(PauseTo::Ram).await,
        State::Hibernated => pause(PauseTo::Disk).await,
        State::Hibernating => {
            pause(PauseTo::Ram).await;
            bench.fakes.held.send_replace(true);
            begin(async move { drop(sandboxes.pause(&it, PauseTo::Disk).await) }.boxed());
        }
        State::Resuming => {
            pause(PauseTo::Disk).await;
            bench.fakes.held.send_replace(true);
            begin(async move { drop(sandboxes.resume(&it, None).await) }.boxed());
        }
        State::Failed => {
            let pid = bench.show(&id).await.pid.unwrap();
            fake::born(pid).unwrap().end().await.unwrap();
        }
        State::Killing => {
            bench.fakes.held.send_replace(true);
            begin(async move { drop(sandboxes.kill(&it).await) }.boxed());
        }
        _ => {}
    }
    bench.until(&id, state).await;
    (bench, id)
}

/// How a command went: taken; refused, with this state and this message; or there is no such sandbox any more.
enum Outcome {
    Taken,
    Refused(State, String),
    Unknown,
}

async fn ask(bench: &Bench, id: &str, command: &str) -> Outcome {
    let sandboxes = &bench.sandboxes;
    let name = || "ci".parse().unwrap();
    let told = async {
        match command {
            "requests" => sandboxes.visit(id, LIMIT).await.map(drop),
            "commands" => {
                let echo = Command { command: vec!["echo".into()], ..Command::default() };
                sandboxes.exec(id, echo, LIMIT).await.map(drop)
            }
            "pause" => sandboxes.pause(id, PauseTo::Ram).await.map(drop),
            "pause to disk" => sandboxes.pause(id, PauseTo::Disk).await.map(drop),
            "resume" => sandboxes.resume(id, None).await.map(drop),
            "fork" => sandboxes.fork(id, 1, LIMIT).await.map(drop),
            "timeout" => sandboxes.timeout(id, LIMIT).await.map(drop),
            "hold" => sandboxes.hold(id, name(), None).await.map(drop),
            "release" => sandboxes.release(id, name()).await.map(drop),
            "logs" => sandboxes.logs(id).await.map(drop),
            "kill" => sandboxes.kill(id).await,
            other => panic!("{other}"),
        }
    };
    let mut told = std::pin::pin!(told);
    let told = match tokio::time::timeout(NOTHING_HAPPENS, &mut told).await {
        Ok(told) => told,
        // It waits for what is going on, which goes on now.
        Err(_) => {
            bench.fakes.held.send_replace(false);
            within(told).await
        }
    };
    match told {
        Ok(()) => Outcome::Taken,
        Err(SandboxError::Unknown { .. }) => Outcome::Unknown,
        Err(error) => match error {
            SandboxError::State { state, .. } => Outcome::Refused(state, error.to_string()),
            other => panic!("{command}: {other:?}"),
        },
    }
}

#[tokio::test(start_paused = true)]
async fn a_command_is_taken_or_refused_with_the_state_and_with_what_is_taken_there() {
    for state in STATES {
        let mut taken = Vec::new();
        for command in COMMANDS {
            let (bench, id) = in_state(state).await;
            match ask(&bench, &id, command).await {
                Outcome::Taken => taken.push(command),
                Outcome::Refused(named, message) => {
                    let is_it = match state {
                        // A request waits for what it cannot be let in by.
                        State::Pausing => [state, State::Suspended].contains(&named),
                        State::Hibernating => [state, State::Hibernated].contains(&named),
                        _ => named == state,
                    };
                    assert!(is_it, "{command}, {state}: {message}");
                    let says = format!("is {named}: it cannot ");
                    let possible = format!("possible now: {}", allowed_of_sandbox(named));
                    assert!(message.contains(&says) && message.contains(&possible), "{command}, {state}: {message}");
                }
                Outcome::Unknown => assert_eq!(state, State::Killing, "{command}"),
            }
        }
        assert_eq!(taken.join(", "), allowed_of_sandbox(state), "{state}");
    }
}
