//! Leaves a server running: the same command again, without `--detach`, in a process group of its own.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context, bail};

use super::UpArgs;

/// Lines of the log that are shown when the server does not come up.
const LAST_LINES: usize = 5;

pub(super) fn run(args: &UpArgs) -> anyhow::Result<ExitCode> {
    let log = args.data.join("stasis.log");
    let file =
        File::options().create(true).append(true).open(&log).with_context(|| format!("the log {}", log.display()))?;
    let before = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
    let rest: Vec<OsString> = std::env::args_os().skip(1).filter(|arg| arg != "--detach").collect();
    let mut server = Command::new(std::env::current_exe()?)
        .args(rest)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(file)
        .process_group(0)
        .spawn()?;
    let stdout = server.stdout.take().context("the server's stdout")?;
    let mut first = String::new();
    BufReader::new(stdout).read_line(&mut first)?;
    match first.strip_prefix("ready ") {
        Some(url) => {
            writeln!(
                io::stdout(),
                "stasis is ready at {} (process {}, log {})",
                url.trim(),
                server.id(),
                log.display()
            )?;
            Ok(ExitCode::SUCCESS)
        }
        None => {
            let status = server.wait()?;
            let bytes = std::fs::read(&log).unwrap_or_default();
            let text = String::from_utf8_lossy(bytes.get(before..).unwrap_or_default());
            let lines: Vec<_> = text.lines().collect();
            let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n");
            bail!("the server did not come up ({status}):\n{last}")
        }
    }
}
