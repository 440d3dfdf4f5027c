//! From the node's [`Start`] to a command: whose it is, where it runs, what it sees.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use stasis_guest_wire::{boot::Start, exec::Exec};

/// Who runs the function.
const USER: &str = "user";

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Where the runtimes' hooks are, if this root file system has them, and how their runtimes are told.
const PYTHON_HOOK: &str = "/usr/lib/stasis/python";
const NODE_HOOK: &str = "/usr/lib/stasis/node-hook.cjs";

/// Why no command could be made.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// `/etc/passwd` cannot be read.
    #[error("cannot read /etc/passwd")]
    Passwd(#[source] io::Error),
    /// It has no usable line for the user.
    #[error("/etc/passwd has no user {USER:?}")]
    NoUser,
    /// The pipe for its output could not be used twice.
    #[error("cannot make the function's output")]
    Output(#[source] io::Error),
}

/// A line of `/etc/passwd`. (The C library would look beyond it, for which a static program is the wrong place.)
#[derive(Debug, Clone, PartialEq, Eq)]
struct Account {
    uid: u32,
    gid: u32,
    home: PathBuf,
}

impl Account {
    fn find(name: &str, passwd: &str) -> Option<Self> {
        passwd.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let [found, _, uid, gid, _, home, ..] = fields.as_slice() else { return None };
            (*found == name)
                .then(|| Some(Self { uid: uid.parse().ok()?, gid: gid.parse().ok()?, home: PathBuf::from(home) }))?
        })
    }
}

/// The command that [`Start`] asks for, printing to `output`.
///
/// # Errors
/// The user does not exist, or the output cannot be used.
pub fn command(start: &Start, output: io::PipeWriter) -> Result<Command, StartError> {
    let mut command = shell(start)?;
    command
        .args(["-c", &start.command])
        .stdin(Stdio::null())
        .stdout(output.try_clone().map_err(StartError::Output)?)
        .stderr(output);
    Ok(command)
}

/// A command beside the function of [`Start`], without its standard streams. The shell looks for program and directory: what it does not
/// find is told on standard error and by the status, and its own start does not fail.
///
/// # Errors
/// The user does not exist.
pub fn another(start: &Start, exec: &Exec) -> Result<Command, StartError> {
    let mut command = shell(start)?;
    let directory = exec.directory.as_deref().unwrap_or(".");
    command.args(["-c", r#"cd -- "$0" && exec "$@""#, directory]).args(&exec.command).envs(&exec.env);
    Ok(command)
}

/// A shell of the user, in the function's directory and environment.
fn shell(start: &Start) -> Result<Command, StartError> {
    let passwd = fs::read_to_string("/etc/passwd").map_err(StartError::Passwd)?;
    let account = Account::find(USER, &passwd).ok_or(StartError::NoUser)?;
    let directory = if Path::new("/app").is_dir() { Path::new("/app") } else { account.home.as_path() };
    let mut command = Command::new("/bin/sh");
    command
        .current_dir(directory)
        .env_clear()
        .envs(cpu_switches())
        .envs(environment(start, &account, |hook| Path::new(hook).exists()))
        .process_group(0)
        .gid(account.gid)
        // With the user, the standard library drops the supplementary groups too.
        .uid(account.uid);
    Ok(command)
}

/// Switches by which the node keeps user code from registers that the guest's kernel cannot save (pool's kernel command lines); they reach
/// this process from the kernel.
const CPU_SWITCHES: [&str; 4] =
    ["GLIBC_TUNABLES", "OPENSSL_ia32cap", "SIMDUTF_FORCE_IMPLEMENTATION", "NPY_DISABLE_CPU_FEATURES"];

fn cpu_switches() -> impl Iterator<Item = (&'static str, std::ffi::OsString)> {
    CPU_SWITCHES.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)))
}

fn environment(start: &Start, account: &Account, exists: impl Fn(&str) -> bool) -> BTreeMap<String, String> {
    let mut env: BTreeMap<String, String> = [
        ("PATH", PATH.to_owned()),
        ("HOME", account.home.to_string_lossy().into_owned()),
        ("USER", USER.to_owned()),
        ("LOGNAME", USER.to_owned()),
        ("PORT", start.port.to_string()),
        ("LANG", "C.UTF-8".to_owned()),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .chain(start.env.clone())
    .collect();
    // A path that does not exist costs Python a look per import and keeps Node from starting.
    if exists(PYTHON_HOOK) {
        prepend(&mut env, "PYTHONPATH", PYTHON_HOOK, ":");
    }
    if exists(NODE_HOOK) {
        prepend(&mut env, "NODE_OPTIONS", &format!("--require={NODE_HOOK}"), " ");
    }
    env
}

fn prepend(env: &mut BTreeMap<String, String>, name: &str, value: &str, separator: &str) {
    let value = match env.get(name).filter(|own| !own.is_empty()) {
        Some(own) => format!("{value}{separator}{own}"),
        None => value.to_owned(),
    };
    env.insert(name.to_owned(), value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nbroken\nuser:x:1000:1001::/home/user:/bin/bash\n";

    fn start(env: &[(&str, &str)]) -> Start {
        Start {
            command: "true".into(),
            port: 8080,
            ready_path: None,
            ready_timeout: Duration::ZERO,
            env: env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
            wall_clock_ns: 0,
        }
    }

    #[test]
    fn the_user_is_found() {
        let account = Account::find("user", PASSWD).unwrap();
        assert_eq!(account, Account { uid: 1000, gid: 1001, home: "/home/user".into() });
        assert_eq!(Account::find("us", PASSWD), None);
        assert_eq!(Account::find("broken", PASSWD), None);
    }

    #[test]
    fn the_function_sees_its_own_variables_and_the_hooks() {
        let account = Account::find("user", PASSWD).unwrap();
        let own = start(&[("PYTHONPATH", "/app/lib"), ("LANG", "de_DE.UTF-8"), ("KEY", "value")]);
        let env = environment(&own, &account, |_| true);
        assert_eq!(env["PORT"], "8080");
        assert_eq!(env["HOME"], "/home/user");
        assert_eq!(env["LANG"], "de_DE.UTF-8");
        assert_eq!(env["KEY"], "value");
        assert_eq!(env["PYTHONPATH"], "/usr/lib/stasis/python:/app/lib");
        assert_eq!(env["NODE_OPTIONS"], "--require=/usr/lib/stasis/node-hook.cjs");
    }

    #[test]
    fn without_hooks_nothing_points_to_them() {
        let account = Account::find("user", PASSWD).unwrap();
        let env = environment(&start(&[]), &account, |_| false);
        assert!(!env.contains_key("PYTHONPATH") && !env.contains_key("NODE_OPTIONS"));
    }
}
