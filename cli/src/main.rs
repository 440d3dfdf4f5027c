//! The `stasis` binary: parses, builds, runs. Every role is a subcommand.

mod bench;
mod client;
mod doctor;
mod down;
mod jailed;
mod running;
mod up;

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use self::jailed::Jailed;

/// Serverless microVMs: functions and sandboxes that start from a snapshot
#[derive(Debug, Parser)]
#[command(name = "stasis", version, about)]
struct Cli {
    #[command(flatten)]
    log: LogArgs,
    #[command(flatten)]
    api: client::ApiArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Args)]
struct LogArgs {
    /// What to log: a level, or a filter such as `info,stasis_pool=debug`
    #[arg(long, env = "STASIS_LOG", default_value = "info", global = true, value_name = "FILTER")]
    log: String,
    /// Log lines as JSON
    #[arg(long, env = "STASIS_LOG_JSON", global = true)]
    log_json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run everything on this machine: gateway and node
    Up(Box<up::UpArgs>),
    /// Stop `stasis up`, and remove what a killed one left behind
    Down(down::DownArgs),
    /// Check what this host offers, and say what to do about what it lacks
    Doctor(doctor::DoctorArgs),
    /// Build, list and remove templates
    #[command(subcommand)]
    Template(client::TemplateCommand),
    /// List pools, and set how many VMs they keep ready
    #[command(subcommand)]
    Pool(client::PoolCommand),
    /// Make, pause, resume and kill sandboxes
    #[command(subcommand)]
    Sandbox(client::SandboxCommand),
    /// Show what the node can still afford, and what of it is promised
    Capacity(client::CapacityArgs),
    /// Call a function
    Invoke(client::InvokeCommand),
    /// Measure
    #[command(subcommand)]
    Bench(bench::BenchCommand),
}

fn main() -> ExitCode {
    let end = match Jailed::read(std::env::args_os().skip(1)) {
        Some(jailed) => start_log(&jailed::log_args()).and(jailed).and_then(Jailed::run),
        None => command(Cli::parse()),
    };
    end.unwrap_or_else(|error| fail(&format!("{error:#}")))
}

fn command(cli: Cli) -> anyhow::Result<ExitCode> {
    start_log(&cli.log)?;
    match cli.command {
        Command::Up(args) => up::run(*args),
        Command::Down(args) => block_on(down::run(&args)),
        Command::Doctor(args) => doctor::run(&args),
        Command::Template(command) => block_on(client::template(&cli.api.access(), command)),
        Command::Pool(command) => block_on(client::pool(&cli.api.access(), command)),
        Command::Sandbox(command) => block_on(client::sandbox(&cli.api.access(), command)),
        Command::Capacity(args) => block_on(client::capacity(&cli.api.access(), args)),
        Command::Invoke(command) => block_on(client::invoke(&cli.api.access(), command)),
        Command::Bench(command) => block_on(bench::run(&cli.api.access(), command)),
    }
}

fn block_on(work: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

fn start_log(args: &LogArgs) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&args.log).with_context(|| format!("--log {:?} is not a filter", args.log))?;
    // Whoever reads it may be gone, and a line that cannot be written is no reason to end: a VM may outlive its node's log.
    let log = tracing_subscriber::fmt().log_internal_errors(false).with_env_filter(filter).with_writer(std::io::stderr);
    if args.log_json {
        log.json().init()
    } else {
        log.with_ansi(false).init()
    }
    Ok(())
}

#[allow(clippy::print_stderr, reason = "the one place where a command's failure is told")]
fn fail(reason: &str) -> ExitCode {
    eprintln!("stasis: {reason}");
    ExitCode::FAILURE
}
