//! The verbs of those who use a running gateway: `stasis template …`, `stasis pool …`, `stasis sandbox …` and `stasis invoke …`.
//!
//! They speak plain HTTP to the API and know nothing else of the node.

mod answer;
mod archive;
mod body;
mod build;
mod capacity;
mod exec;
pub(crate) mod http;
mod invoke;
mod pool;
mod sandbox;
mod template;
#[cfg(test)]
mod tests;
mod url;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use self::url::ApiKey;
pub(crate) use self::{
    body::Outgoing, capacity::CapacityArgs, invoke::InvokeCommand, pool::PoolCommand, sandbox::SandboxCommand,
    template::TemplateCommand, url::ApiUrl,
};

/// Where the gateway listens.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ApiArgs {
    /// URL of the gateway
    #[arg(
        long = "api",
        env = "STASIS_API",
        default_value = "http://127.0.0.1:3000",
        global = true,
        value_name = "URL"
    )]
    url: ApiUrl,
    /// The tenant's key, where the gateway asks for one; the environment keeps it out of the list of processes
    #[arg(long = "api-key", env = "STASIS_API_KEY", hide_env_values = true, global = true, value_name = "KEY")]
    key: Option<ApiKey>,
}

impl ApiArgs {
    /// The gateway, and the key for it.
    pub(crate) fn access(&self) -> ApiUrl {
        self.url.clone().with(self.key.clone())
    }
}

/// Runs a `stasis template` command.
///
/// # Errors
/// Where it could not be done; the exit code tells of what was done and failed.
pub(crate) async fn template(api: &ApiUrl, command: TemplateCommand) -> anyhow::Result<ExitCode> {
    let end = template::run(api, command, &mut Terminal::of_this_process()).await;
    quietly(end)
}

/// Runs a `stasis pool` command.
///
/// # Errors
/// Where it could not be done.
pub(crate) async fn pool(api: &ApiUrl, command: PoolCommand) -> anyhow::Result<ExitCode> {
    let end = pool::run(api, command, &mut Terminal::of_this_process()).await;
    quietly(end)
}

/// Runs a `stasis sandbox` command.
///
/// # Errors
/// Where it could not be done.
pub(crate) async fn sandbox(api: &ApiUrl, command: SandboxCommand) -> anyhow::Result<ExitCode> {
    let end = sandbox::run(api, command, &mut Terminal::of_this_process()).await;
    quietly(end)
}

/// Runs `stasis capacity`.
///
/// # Errors
/// Where it could not be done.
pub(crate) async fn capacity(api: &ApiUrl, args: CapacityArgs) -> anyhow::Result<ExitCode> {
    quietly(capacity::run(api, args, &mut Terminal::of_this_process()).await)
}

/// Runs `stasis invoke`.
///
/// # Errors
/// Where there was no answer, or it broke off; an answer of 400 and above is an exit code.
pub(crate) async fn invoke(api: &ApiUrl, command: InvokeCommand) -> anyhow::Result<ExitCode> {
    let end = invoke::run(api, command, &mut Terminal::of_this_process()).await;
    quietly(end)
}

/// How a verb ended that was carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Success,
    Failure,
    /// With the status of what was run.
    Status(i32),
}

/// Where results and remarks go.
struct Terminal {
    out: Box<dyn Write>,
    err: Box<dyn Write>,
}

impl Terminal {
    fn of_this_process() -> Self {
        Self { out: Box::new(io::stdout()), err: Box::new(io::stderr()) }
    }
}

/// A reader that has seen enough (`| head`) is no failure.
pub(crate) fn quietly(end: anyhow::Result<Outcome>) -> anyhow::Result<ExitCode> {
    match end {
        Ok(Outcome::Success) => Ok(ExitCode::SUCCESS),
        Ok(Outcome::Failure) => Ok(ExitCode::FAILURE),
        // A status is a byte; what does not fit is no success.
        Ok(Outcome::Status(status)) => Ok(u8::try_from(status).map_or(ExitCode::FAILURE, ExitCode::from)),
        Err(error) if error.is::<OutputClosed>() => Ok(ExitCode::SUCCESS),
        Err(error) => Err(error),
    }
}

/// Nobody reads our output any more.
#[derive(Debug)]
struct OutputClosed;

impl std::fmt::Display for OutputClosed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the output was closed")
    }
}

impl std::error::Error for OutputClosed {}

/// Writes a result, at once.
pub(crate) fn print(out: &mut dyn Write, bytes: &[u8]) -> anyhow::Result<()> {
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        Err(error) => Err(anyhow::Error::new(error).context("cannot write to the standard output")),
    }
}
