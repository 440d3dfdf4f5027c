//! A `stasis up` of our own.
//!
//! ```text
//! start ──▶ ready ──stop (SIGUSR1, as `stasis down`), leave (SIGTERM), or kill (SIGKILL)──▶ ended
//! ```

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Mutex,
    time::Duration,
};

use rustix::process::Signal;

use crate::{
    cli::Stasis,
    groups,
    host::{self, Process},
    http::Api,
    lane,
    log::Log,
};

/// What a server may take to end: it lets requests finish for ten seconds, then ends its VMs.
const END: Duration = Duration::from_secs(60);

/// Tells a server to bring its sandboxes to disk before it ends.
const SAVE: Signal = Signal::USR1;

pub(crate) struct Server {
    data: PathBuf,
    url: String,
    pub(crate) log: Log,
    child: Mutex<Child>,
}

/// `stasis up` on `data`, on a free port unless the arguments say otherwise. The data directory is in the environment, by which
/// the server is found later; VMs are found by what they hold open.
pub(crate) fn up(data: &Path, arguments: &[&str]) -> Command {
    // It ends with this suite, should that crash.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "USR1", "--"]).arg(lane::binary()).arg("up").args(arguments);
    if !arguments.contains(&"--listen") {
        command.args(["--listen", "127.0.0.1:0"]);
    }
    for (flag, value) in [("--disk", "20GiB"), ("--claim-budget", "60s")] {
        if !arguments.contains(&flag) {
            command.args([flag, value]);
        }
    }
    command.env("STASIS_DATA", data).env_remove("STASIS_LISTEN");
    command
}

/// Outlives the run, for whoever looks into a failure.
fn log_of(data: &Path) -> PathBuf {
    let name = data.file_name().unwrap_or_default().display().to_string();
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("e2e-{name}.log"))
}

impl Server {
    /// Starts one, and waits until it is ready.
    pub(crate) fn start(data: &Path, arguments: &[&str]) -> Self {
        fs::create_dir_all(data).unwrap();
        let mut command = up(data, arguments);
        command.env("STASIS_LOG", "info,stasis_pool=debug").env("STASIS_LOG_JSON", "true");
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        groups::of_server(data, child.id());
        let log = Log::reading(child.stderr.take().unwrap(), &log_of(data));
        let mut first = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        let Some(url) = first.trim().strip_prefix("ready ") else {
            let _ = child.wait();
            panic!("the server did not come up, but said {first:?}:\n{}", log.tail());
        };
        Self { data: data.to_owned(), url: url.to_owned(), log, child: Mutex::new(child) }
    }

    /// Starts one whose guests are bare: they answer within a millisecond where a kernel would be interpreted.
    pub(crate) fn start_bare(data: &Path, more: &[&str]) -> Self {
        let bare = lane::bare().expect("STASIS_BARE names the bare guest").display().to_string();
        let base = format!("debian={bare}.ext4");
        // These guests write little.
        let disk = if more.contains(&"--disk") { [].as_slice() } else { &["--disk", "4GiB"] };
        Self::start(data, &[["--kernel", &bare, "--base", &base].as_slice(), disk, more].concat())
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn api(&self) -> Api {
        Api::at(&self.url)
    }

    pub(crate) fn stasis(&self) -> Stasis {
        Stasis::speaking_to(&self.url)
    }

    pub(crate) fn data(&self) -> &Path {
        &self.data
    }

    /// Where the node keeps its files while it runs.
    pub(crate) fn files(&self) -> PathBuf {
        self.data.join("data")
    }

    /// Its own process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.lock().unwrap().id()
    }

    /// Its VMs' processes, and pagers.
    pub(crate) fn vms(&self) -> Vec<Process> {
        Process::children_of(self.pid())
    }

    /// As `stasis down`: sandboxes go to disk, and then everything must be gone. Lists what is not.
    pub(crate) fn stop(&self) -> Vec<String> {
        let vms = self.vms();
        let mut left = self.end(SAVE);
        left.extend(vms.iter().filter(|vm| !vm.ends_within(Duration::ZERO)).map(|vm| format!("{vm:?}, a VM")));
        left.extend(host::leftovers(&self.data));
        left
    }

    /// SIGTERM: sandboxes' VMs go on, for the next one.
    pub(crate) fn leave(&self) {
        assert_eq!(self.end(Signal::TERM), Vec::<String>::new());
    }

    /// SIGKILL. Its VMs are returned: those that no sandbox has must end by themselves.
    pub(crate) fn kill(&self) -> Vec<Process> {
        let vms = self.vms();
        self.end(Signal::KILL);
        vms
    }

    fn end(&self, signal: Signal) -> Vec<String> {
        let mut child = self.child.lock().unwrap();
        if child.try_wait().unwrap().is_some() {
            return vec!["the server had ended before it was told to".into()];
        }
        let Some(process) = Process::open(child.id()) else { return vec!["the server cannot be found".into()] };
        process.signal(signal);
        if !process.ends_within(END) {
            process.signal(Signal::KILL);
            let _ = child.wait();
            return vec![format!("the server did not end within {END:?}")];
        }
        let status = child.wait().unwrap();
        if signal != Signal::KILL && !status.success() {
            return vec![format!("the server's exit: {status}; its log ends\n{}", self.log.tail())];
        }
        Vec::new()
    }
}

impl Drop for Server {
    /// After a failed assertion.
    fn drop(&mut self) {
        let ended = self.child.lock().map_or(true, |mut child| !matches!(child.try_wait(), Ok(None)));
        if !ended {
            self.end(SAVE);
        }
    }
}
