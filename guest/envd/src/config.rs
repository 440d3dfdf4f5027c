//! What a daemon is told when it is made. All defaults are here.

use std::{collections::BTreeMap, io, path::PathBuf, sync::Arc, time::SystemTime};

use rustix::{
    fs::Timespec,
    time::{ClockId, clock_settime},
};

/// Sets the wall clock.
pub type Clock = Arc<dyn Fn(SystemTime) -> io::Result<()> + Send + Sync>;

/// What a daemon is told when it is made.
#[derive(Clone)]
pub struct Config {
    /// Who a request without a user is for, until `/init` says otherwise.
    pub default_user: String,
    /// `PATH` of every process.
    pub path: String,
    /// Variables of every process that `/init` does not replace.
    pub envs: BTreeMap<String, String>,
    /// The user database.
    pub passwd: PathBuf,
    /// The groups of the users.
    pub group: PathBuf,
    /// Sets the wall clock when `/init` brings a time.
    pub clock: Clock,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            default_user: "user".into(),
            path: "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into(),
            envs: BTreeMap::from([("E2B_SANDBOX".into(), "true".into())]),
            passwd: "/etc/passwd".into(),
            group: "/etc/group".into(),
            clock: Arc::new(set_clock),
        }
    }
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Values of variables may be secret.
        f.debug_struct("Config").field("default_user", &self.default_user).finish_non_exhaustive()
    }
}

fn set_clock(now: SystemTime) -> io::Result<()> {
    let since = now.duration_since(SystemTime::UNIX_EPOCH).map_err(io::Error::other)?;
    let seconds = i64::try_from(since.as_secs()).map_err(io::Error::other)?;
    Ok(clock_settime(ClockId::Realtime, Timespec { tv_sec: seconds, tv_nsec: since.subsec_nanos().into() })?)
}
