//! All processes.

use std::{
    collections::HashMap,
    io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::{
    connect::{Code, RpcError},
    envd::Envd,
    paths,
    process::{
        child::{self, Birth, Wanted},
        message::{Listed, Selector, Start},
        output::Subscriber,
        running::Process,
    },
    users::User,
};

/// How long an end is kept for who comes late.
const KEPT: Duration = Duration::from_secs(30);

/// By their ids: those that run, and those that ended lately.
#[derive(Debug, Default)]
pub(crate) struct Processes(Mutex<HashMap<u32, Arc<Process>>>);

impl Processes {
    fn all(&self) -> MutexGuard<'_, HashMap<u32, Arc<Process>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that run, in the order of their ids.
    pub(super) fn list(&self) -> Vec<Listed> {
        let mut listed: Vec<Listed> = (self.all().values().filter(|process| process.ended().is_none()))
            .map(|process| Listed { config: process.config.clone(), pid: process.pid, tag: process.tag.clone() })
            .collect();
        listed.sort_by_key(|process| process.pid);
        listed
    }

    /// One that runs or has ended lately; with the same tag, rather one that runs.
    pub(super) fn known(&self, selector: &Selector) -> Result<Arc<Process>, RpcError> {
        let not_found = |what: String| RpcError::new(Code::NotFound, format!("process with {what} not found"));
        match (selector.pid, &selector.tag) {
            (Some(pid), _) => self.all().get(&pid).cloned().ok_or_else(|| not_found(format!("pid {pid}"))),
            (None, Some(tag)) => (self.all().values().filter(|process| process.tag.as_ref() == Some(tag)))
                .max_by_key(|process| (process.ended().is_none(), process.pid))
                .cloned()
                .ok_or_else(|| not_found(format!("tag {tag}"))),
            (None, None) => Err(RpcError::invalid("the process is not selected: its pid or tag is missing")),
        }
    }

    /// One that runs.
    pub(super) fn running(&self, selector: &Selector) -> Result<Arc<Process>, RpcError> {
        let process = self.known(selector)?;
        if process.ended().is_some() {
            return Err(RpcError::new(Code::NotFound, format!("process with pid {} not found", process.pid)));
        }
        Ok(process)
    }
}

/// Starts a process, which is followed from now on; nothing that it writes escapes the subscriber.
pub(super) fn start(envd: &Envd, user: &User, request: Start) -> Result<(Arc<Process>, Subscriber), RpcError> {
    let Start { process: config, pty, tag, stdin } = request;
    if config.cmd.is_empty() {
        return Err(RpcError::invalid("the command is empty"));
    }
    let workdir = envd.workdir();
    let cwd = paths::resolve(config.cwd.as_deref().unwrap_or_default(), user, workdir.as_deref())
        .map_err(|error| RpcError::invalid(error.to_string()))?;
    check_cwd(&cwd)?;
    let wanted = match pty {
        Some(pty) => {
            let (cols, rows) = pty.size.checked()?;
            Wanted::Pty { cols, rows }
        }
        None => Wanted::Pipes { stdin: stdin.unwrap_or(true) },
    };
    let mut envs = own_envs(envd, user);
    envs.extend(envd.settings().envs.clone());
    envs.extend(config.envs.clone());
    if let Some(name) = envs.keys().find(|name| name.is_empty() || name.contains(['=', '\0'])) {
        return Err(RpcError::invalid(format!("{name:?} is not the name of a variable")));
    }
    let birth = Birth { cmd: &config.cmd, args: &config.args, envs, cwd: &cwd, user, io: wanted };
    let (child, io) = child::spawn(&birth).map_err(|error| unstarted(&config.cmd, &error))?;
    // A child that was not waited for yet has an id.
    let pid = child.id().unwrap_or_default();
    let (process, sources) = Process::new(pid, config, tag, io);
    let (process, envd) = (Arc::new(process), envd.clone());
    let subscriber = process.subscribe();
    envd.processes().all().insert(pid, Arc::clone(&process));
    let followed = Arc::clone(&process);
    tokio::spawn(async move {
        followed.follow(sources, child).await;
        tokio::time::sleep(KEPT).await;
        let mut all = envd.processes().all();
        // Another one may have its id by now.
        if all.get(&pid).is_some_and(|process| Arc::ptr_eq(process, &followed)) {
            all.remove(&pid);
        }
    });
    Ok((process, subscriber))
}

fn own_envs(envd: &Envd, user: &User) -> std::collections::BTreeMap<String, String> {
    let mut envs = envd.config().envs.clone();
    let home = user.home.to_string_lossy().into_owned();
    for (name, value) in [("PATH", &envd.config().path), ("HOME", &home), ("USER", &user.name), ("LOGNAME", &user.name)]
    {
        envs.insert(name.into(), value.clone());
    }
    envs
}

fn check_cwd(cwd: &Path) -> Result<(), RpcError> {
    match cwd.metadata() {
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => Err(RpcError::invalid(format!("cwd '{}' is not a directory", cwd.display()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(RpcError::invalid(format!("cwd '{}' does not exist", cwd.display())))
        }
        Err(error) => Err(RpcError::invalid(format!("cwd '{}': {error}", cwd.display()))),
    }
}

fn unstarted(cmd: &str, error: &io::Error) -> RpcError {
    let code = match error.kind() {
        io::ErrorKind::OutOfMemory | io::ErrorKind::WouldBlock => Code::ResourceExhausted,
        _ => Code::InvalidArgument,
    };
    RpcError::new(code, format!("error starting process '{cmd}': {error}"))
}
