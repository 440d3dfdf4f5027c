//! The daemon: what all requests share.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use crate::{
    access::Token,
    config::Config,
    filesystem::Watchers,
    process::Processes,
    system::LastTicks,
    users::{User, Users},
};

/// What `/init` sets.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    /// Whoever has it may do everything; none: everybody may.
    pub(crate) token: Option<Token>,
    /// Variables of every process.
    pub(crate) envs: BTreeMap<String, String>,
    /// Who a request without a user is for.
    pub(crate) default_user: String,
    /// Where a process without a folder starts, instead of its user's home.
    pub(crate) workdir: Option<PathBuf>,
    /// The time of the newest `/init` that was taken.
    pub(crate) told_at: Option<SystemTime>,
}

/// One daemon. Clones are the same one.
#[derive(Debug, Clone)]
pub struct Envd(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    config: Config,
    settings: Mutex<Settings>,
    processes: Processes,
    watchers: Watchers,
    last_ticks: LastTicks,
}

impl Envd {
    /// One that runs nothing yet.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let settings = Settings { default_user: config.default_user.clone(), ..Settings::default() };
        Self(Arc::new(Shared {
            config,
            settings: Mutex::new(settings),
            processes: Processes::default(),
            watchers: Watchers::default(),
            last_ticks: LastTicks::default(),
        }))
    }

    pub(crate) fn config(&self) -> &Config {
        &self.0.config
    }

    pub(crate) fn settings(&self) -> MutexGuard<'_, Settings> {
        self.0.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn processes(&self) -> &Processes {
        &self.0.processes
    }

    pub(crate) fn watchers(&self) -> &Watchers {
        &self.0.watchers
    }

    pub(crate) fn last_ticks(&self) -> &LastTicks {
        &self.0.last_ticks
    }

    /// The users as they are now: a template may have added some.
    pub(crate) fn users(&self) -> Users {
        Users::read(&self.config().passwd, &self.config().group)
    }

    /// The user of that name, or the default one; else the name that nobody has.
    pub(crate) fn user(&self, name: Option<&str>) -> Result<User, String> {
        let name = name.map_or_else(|| self.settings().default_user.clone(), str::to_owned);
        self.users().named(&name).ok_or(name)
    }

    pub(crate) fn workdir(&self) -> Option<PathBuf> {
        self.settings().workdir.clone()
    }
}
