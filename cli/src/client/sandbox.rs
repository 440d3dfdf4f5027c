//! `stasis sandbox create | list | inspect | connect | pause | resume | fork | timeout | hold | exec | logs | kill`.

use std::time::{Duration, UNIX_EPOCH};

use http::Method;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use stasis_pool_api::{Name, OnTimeout, PauseTo, SandboxInfo, SandboxState, TemplateName, Timestamp};

use super::{
    Outcome, Terminal,
    answer::{all, ask, get, show},
    exec, print,
    template::columns,
    url::ApiUrl,
};

/// Sandboxes: VMs that stay, and are paused and resumed. What they serve is at /sandbox/ID/PATH of the API's address
#[derive(Debug, Clone, clap::Subcommand)]
pub(crate) enum SandboxCommand {
    /// Make one, and print its id
    Create {
        /// Its template
        template: TemplateName,
        /// How long it may run, paused time not counted (300s if not given)
        #[arg(long, value_parser = duration)]
        timeout: Option<Duration>,
        /// What its deadline does: pause or kill (kill if not given)
        #[arg(long, value_parser = parse::<OnTimeout>)]
        on_timeout: Option<OnTimeout>,
        /// How long it is idle before it is paused; 0s: it is never paused for that
        #[arg(long, value_parser = duration)]
        idle: Option<Duration>,
        /// How long it is suspended before its memory goes to disk; 0s: only when memory is short
        #[arg(long, value_parser = duration)]
        hibernate_after: Option<Duration>,
        /// Requests to it while it is paused are refused, instead of resuming it
        #[arg(long)]
        no_auto_resume: bool,
        /// A note on it; may be repeated
        #[arg(long, short, value_name = "KEY=VALUE", value_parser = note)]
        metadata: Vec<(String, String)>,
        #[command(flatten)]
        output: Output,
    },
    /// List them
    List {
        /// Only those in this state
        #[arg(long, value_parser = parse::<SandboxState>)]
        state: Option<SandboxState>,
        #[command(flatten)]
        output: Output,
    },
    /// Show all that is known of one, as JSON on many lines; with --json, on one
    Inspect {
        /// Its id
        id: String,
        #[command(flatten)]
        output: Output,
    },
    /// Have it run, and say where it is reached
    Connect {
        /// Its id
        id: String,
        /// Its time begins anew, with so much
        #[arg(long, value_parser = duration)]
        timeout: Option<Duration>,
        #[command(flatten)]
        output: Output,
    },
    /// Pause it
    Pause {
        /// Its id
        id: String,
        /// Where its memory goes: ram or disk
        #[arg(long, default_value = "ram", value_parser = parse::<PauseTo>)]
        to: PauseTo,
        #[command(flatten)]
        output: Output,
    },
    /// Resume it
    Resume {
        /// Its id
        id: String,
        /// Its time begins anew, with so much
        #[arg(long, value_parser = duration)]
        timeout: Option<Duration>,
        #[command(flatten)]
        output: Output,
    },
    /// Make more of a running one, that go on from this moment as somebody else; prints their ids
    Fork {
        /// Its id
        id: String,
        /// How many
        #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
        count: u32,
        #[command(flatten)]
        output: Output,
    },
    /// Set how long it may run from now on
    Timeout {
        /// Its id
        id: String,
        /// How long
        #[arg(value_parser = duration)]
        timeout: Duration,
        #[command(flatten)]
        output: Output,
    },
    /// Keep it from being paused for idleness
    Hold {
        /// Its id
        id: String,
        /// What the hold is called
        name: Name,
        /// For how long; until it is released if not given
        #[arg(long, value_parser = duration, conflicts_with = "release")]
        lasts: Option<Duration>,
        /// Release it instead
        #[arg(long)]
        release: bool,
        #[command(flatten)]
        output: Output,
    },
    /// Run a command in it, as its function's user
    Exec(exec::ExecArgs),
    /// Print what its function and its console have said last
    Logs {
        /// Its id
        id: String,
        #[command(flatten)]
        output: Output,
    },
    /// End it, and remove all of it
    Kill {
        /// Its id
        id: String,
        #[command(flatten)]
        output: Output,
    },
}

/// How to print.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Output {
    /// Print the gateway's JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Deserialize)]
struct Listing {
    sandboxes: Vec<SandboxInfo>,
}

pub(super) fn duration(text: &str) -> Result<Duration, humantime::DurationError> {
    humantime::parse_duration(text)
}

pub(super) fn note(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("a note is KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// A word that the API knows.
fn parse<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(text.into()).map_err(|error| error.to_string())
}

pub(super) async fn run(url: &ApiUrl, command: SandboxCommand, terminal: &mut Terminal) -> anyhow::Result<Outcome> {
    let of = |id: &str, verb: &str| format!("/v1/sandboxes/{id}{verb}");
    match command {
        SandboxCommand::Create {
            template,
            timeout,
            on_timeout,
            idle,
            hibernate_after,
            no_auto_resume,
            metadata,
            output,
        } => {
            let mut new = Map::new();
            new.insert("template".into(), json!(template));
            let durations = [("timeout", timeout), ("idle", idle), ("hibernate_after", hibernate_after)];
            new.extend(durations.into_iter().filter_map(|(name, value)| Some((name.to_owned(), text(value?)))));
            new.extend(on_timeout.map(|what| ("on_timeout".to_owned(), json!(what))));
            new.insert("auto_resume".into(), (!no_auto_resume).into());
            new.insert("metadata".into(), metadata.into_iter().map(|(key, value)| (key, Value::from(value))).collect());
            let answer = ask(url, Method::POST, "/v1/sandboxes", &Value::Object(new)).await?;
            told(terminal, output, &answer, |info| format!("{}\n", info.id))
        }
        SandboxCommand::List { state, output } => {
            let query = state.map(|state| format!("?state={state}")).unwrap_or_default();
            let answer = get(url, &format!("/v1/sandboxes{query}")).await?;
            show(terminal, output.json, &answer, |Listing { sandboxes }| table(&sandboxes))
        }
        SandboxCommand::Inspect { id, output } => show(terminal, output.json, &get(url, &of(&id, "")).await?, all),
        SandboxCommand::Connect { id, timeout, output } => {
            let answer = ask(url, Method::POST, &of(&id, "/connect"), &with_timeout(timeout)).await?;
            told(terminal, output, &answer, |info| format!("{url}/sandbox/{}/\n", info.id))
        }
        SandboxCommand::Pause { id, to, output } => {
            let answer = ask(url, Method::POST, &of(&id, "/pause"), &json!({ "to": to })).await?;
            told(terminal, output, &answer, state_of)
        }
        SandboxCommand::Resume { id, timeout, output } => {
            let answer = ask(url, Method::POST, &of(&id, "/resume"), &with_timeout(timeout)).await?;
            told(terminal, output, &answer, state_of)
        }
        SandboxCommand::Fork { id, count, output } => {
            let answer = ask(url, Method::POST, &of(&id, "/fork"), &json!({ "count": count })).await?;
            show(terminal, output.json, &answer, |Listing { sandboxes }| {
                sandboxes.iter().map(|child| format!("{}\n", child.id)).collect()
            })
        }
        SandboxCommand::Timeout { id, timeout, output } => {
            let answer = ask(url, Method::POST, &of(&id, "/timeout"), &with_timeout(Some(timeout))).await?;
            told(terminal, output, &answer, state_of)
        }
        SandboxCommand::Hold { id, name, release: true, output, .. } => {
            let answer = ask(url, Method::DELETE, &of(&id, &format!("/hold/{name}")), &Value::Null).await?;
            told(terminal, output, &answer, state_of)
        }
        SandboxCommand::Hold { id, name, lasts, output, .. } => {
            let mut hold = json!({ "name": name });
            if let Some(lasts) = lasts {
                hold["lasts"] = text(lasts);
            }
            let answer = ask(url, Method::POST, &of(&id, "/hold"), &hold).await?;
            told(terminal, output, &answer, state_of)
        }
        SandboxCommand::Exec(args) => exec::exec(url, args, terminal).await,
        SandboxCommand::Logs { id, output } => exec::logs(url, &id, output.json, terminal).await,
        SandboxCommand::Kill { id, output } => {
            ask(url, Method::DELETE, &of(&id, ""), &Value::Null).await?;
            let done = if output.json { format!("{}\n", json!({ "killed": id })) } else { format!("{id} is killed\n") };
            print(&mut terminal.out, done.as_bytes())?;
            Ok(Outcome::Success)
        }
    }
}

fn text(duration: Duration) -> Value {
    humantime::format_duration(duration).to_string().into()
}

fn with_timeout(timeout: Option<Duration>) -> Value {
    timeout.map_or_else(|| json!({}), |timeout| json!({ "timeout": text(timeout) }))
}

fn told(
    terminal: &mut Terminal,
    output: Output,
    answer: &[u8],
    say: impl FnOnce(&SandboxInfo) -> String,
) -> anyhow::Result<Outcome> {
    show(terminal, output.json, answer, |info| say(&info))
}

fn state_of(info: &SandboxInfo) -> String {
    let next = info.next.map(|next| format!(", {:?} at {}", next.what, time(next.at)).to_lowercase());
    format!("{} is {}{}\n", info.id, info.state, next.unwrap_or_default())
}

fn time(at: Timestamp) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(at.as_ms())).to_string()
}

fn table(sandboxes: &[SandboxInfo]) -> String {
    let head = ["ID", "TEMPLATE", "STATE", "SINCE", "ENDS"].map(str::to_owned);
    let rows = sandboxes.iter().map(|info| {
        let ends = info.ends_at.map_or_else(|| "-".to_owned(), time);
        [info.id.to_string(), info.template.to_string(), info.state.to_string(), time(info.entered_at), ends]
    });
    columns(&std::iter::once(head).chain(rows).collect::<Vec<_>>())
}
