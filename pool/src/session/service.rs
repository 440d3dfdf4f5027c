//! The sandboxes of a node.

mod api;
pub(super) mod metrics;
mod start;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::future::join_all;
use stasis_pool_api::{
    Name, NewSandbox, SandboxError, SandboxId, SandboxInfo, SandboxState as State, TemplateName, Timestamp, lasting,
    lasting_or_off,
};
use stasis_state::{Facts, Lifetime, Limits, New, Record, RequestId, Session, Template, Tenant};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};
use uuid::Uuid;

pub(super) use self::start::process_of;
use super::{
    departure::Departure,
    driver::{Around, Driver, First, GRACE},
    info::recorded,
    message::{Goal, Message, Origin, Reply, Source, Watcher},
    visit::{Opening, Visit},
};

/// Longest time that a command waits for what it asked for. Saving a large guest on a busy disk takes seconds, its requests' grace ten.
pub(super) const LIMIT: Duration = Duration::from_secs(120);
/// How much longer than its budget a request waits for its sandbox's own refusal, which says why. Chosen: a task that is not stuck has long
/// answered by then.
const TURN: Duration = Duration::from_secs(1);
/// After how long something that failed is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// Children of a sandbox in one fork.
const MOST_CHILDREN: u32 = 100;
/// How long what is being done to a sandbox may take when the node stops, before it is left in the midst of it: stopping one may take ten
/// seconds, saving a large one some more. The next node ends or calls off what was begun.
const LEAVING: Duration = Duration::from_secs(10);

/// The address of a sandbox's task.
#[derive(Debug, Clone)]
pub(super) struct Handle {
    task: mpsc::UnboundedSender<Message>,
    tenant: Tenant,
    template: TemplateName,
    /// Since when it is suspended, and gives up its memory as soon as that is needed.
    spare: watch::Receiver<Option<Timestamp>>,
    /// What its record says, as it was last written.
    view: watch::Receiver<SandboxInfo>,
}

/// Tells the version of a template.
type Version = Arc<dyn Fn(&TemplateName) -> Option<String> + Send + Sync>;

/// See the module.
#[derive(Clone)]
pub(crate) struct LocalSandboxes {
    /// Whose alone can be seen through this one; all where there is none.
    tenant: Option<Tenant>,
    around: Around,
    tasks: Arc<RwLock<BTreeMap<SandboxId, Handle>>>,
    requests: Arc<AtomicU64>,
    /// The version of a template that is in service.
    version: Version,
}

impl std::fmt::Debug for LocalSandboxes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalSandboxes").field("tasks", &self.read().len()).finish_non_exhaustive()
    }
}

impl LocalSandboxes {
    /// Those of a tenant: no others can be seen through it, and what it makes is that tenant's.
    pub(crate) fn of(&self, tenant: &Tenant) -> Self {
        Self { tenant: Some(tenant.clone()), ..self.clone() }
    }

    fn shows(&self, handle: &Handle) -> bool {
        self.tenant.as_ref().is_none_or(|tenant| *tenant == handle.tenant)
    }

    fn spawn(
        &self,
        record: Record,
        core: Session,
        first: First,
        template: TemplateName,
        source: Source,
        watchers: Vec<Watcher>,
    ) {
        let (task, inbox) = mpsc::unbounded_channel();
        let (id, tenant) = (record.id().clone(), record.tenant().clone());
        let (spare_since, spare) = watch::channel(None);
        let (seen, view) = watch::channel(recorded(&record));
        let state = record.state();
        let driver = Driver {
            around: self.around.clone(),
            core,
            record,
            template: template.clone(),
            source,
            machine: None,
            inbox,
            task: task.clone(),
            spare_since,
            view: seen,
            work: None,
            visitors: HashMap::new(),
            watchers,
            connecting: JoinSet::new(),
            trouble: None,
            ended: false,
            unsaved: false,
            saving: false,
            save_due: false,
            leaving: Departure::default(),
            counted: metrics::Counted::new(state),
            begun: None,
        };
        self.write().insert(id.clone(), Handle { task, tenant, template, spare, view });
        let tasks = Arc::clone(&self.tasks);
        tokio::spawn(async move {
            driver.live(first).await;
            tasks.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
        });
    }

    pub(super) fn read(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<SandboxId, Handle>> {
        self.tasks.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<SandboxId, Handle>> {
        self.tasks.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, id: &str) -> Result<(SandboxId, Handle), SandboxError> {
        let unknown = || SandboxError::Unknown { id: id.chars().take(80).collect() };
        let parsed: SandboxId = id.parse().map_err(|_| unknown())?;
        let handle = self.read().get(&parsed).filter(|handle| self.shows(handle)).cloned().ok_or_else(unknown)?;
        Ok((parsed, handle))
    }

    fn request(&self) -> RequestId {
        RequestId(self.requests.fetch_add(1, Ordering::Relaxed))
    }

    /// Tells a sandbox's task something, and waits for its answer.
    async fn ask<T>(
        &self,
        id: &str,
        wanted: &'static str,
        limit: Duration,
        message: impl FnOnce(Reply<T>) -> Message,
    ) -> Result<T, SandboxError> {
        let (known, handle) = self.find(id)?;
        let (reply, answer) = oneshot::channel();
        let gone = || SandboxError::Unknown { id: known.to_string() };
        handle.task.send(message(reply)).map_err(|_| gone())?;
        match tokio::time::timeout(limit, answer).await {
            Ok(Ok(answer)) => answer,
            // Its VM has ended under the question: what it is now says why.
            Ok(Err(_)) => match (self.find(id)?.1.view.borrow().state, handle.task.is_closed()) {
                (State::Killing | State::Gone, _) | (_, true) => Err(gone()),
                (state, false) => Err(SandboxError::State { id: known, state, wanted }),
            },
            Err(_) => Err(SandboxError::Late { id: known, wanted, limit }),
        }
    }

    /// Has the sandbox that has been suspended longest give up its memory.
    pub(crate) fn spare_one(&self) {
        let longest = {
            let tasks = self.read();
            let spare = tasks.values().filter_map(|handle| Some(((*handle.spare.borrow())?, handle)));
            spare.min_by_key(|(since, _)| *since).map(|(_, handle)| handle.clone())
        };
        if let Some(handle) = longest {
            // It may just have ended.
            let _ = handle.task.send(Message::Spare);
        }
    }

    /// Brings to disk what can be brought there. What cannot stays as it is.
    pub(crate) async fn save(&self) {
        let ids: Vec<_> = self.read().keys().cloned().collect();
        join_all(ids.iter().map(|id| async move {
            let saved = self.ask(id.as_str(), "be hibernated", LIMIT, Message::Save).await;
            if let Err(error) = saved
                && !matches!(error, SandboxError::Unknown { .. } | SandboxError::State { .. })
            {
                tracing::warn!(sandbox = %id, %error, "a sandbox is not brought to disk");
            }
        }))
        .await;
    }

    /// Ends all tasks. VMs go on as they are, for the next node: how many.
    pub(crate) async fn leave(&self) -> usize {
        let all: Vec<_> = self.read().values().map(|handle| handle.task.clone()).collect();
        let left = join_all(all.into_iter().map(async |task| {
            let (asked, mut left) = oneshot::channel();
            // One that has ended has no VM.
            task.send(Message::Leave(asked)).ok()?;
            match tokio::time::timeout(LEAVING, &mut left).await {
                Ok(left) => left.ok()?,
                Err(_) => {
                    task.send(Message::LeaveNow).ok()?;
                    left.await.ok()?
                }
            }
        }))
        .await;
        // One whose sandbox was about to take it over is known to both.
        let left: HashSet<_> = left.into_iter().flatten().chain(self.around.machines.leave_the_rest()).collect();
        left.len()
    }

    async fn make(&self, new: NewSandbox, budget: Duration) -> Result<SandboxInfo, SandboxError> {
        lasting("timeout", new.timeout)?;
        lasting_or_off("idle", new.idle)?;
        lasting_or_off("hibernate_after", new.hibernate_after)?;
        let unknown = || SandboxError::Claim(stasis_pool_api::ClaimError::UnknownTemplate(new.template.clone()));
        let version = (self.version)(&new.template).ok_or_else(unknown)?;
        let invalid = |reason: String| SandboxError::Invalid { reason };
        let name = |text: &str| text.parse::<Name>().map_err(|error| invalid(error.to_string()));
        let some = |duration: Duration| (!duration.is_zero()).then_some(duration);
        let lifetime = Lifetime {
            timeout: Some(new.timeout),
            on_timeout: new.on_timeout,
            auto_resume: new.auto_resume,
            pause_after: some(new.idle),
            hibernate_after: some(new.hibernate_after),
        };
        let tenant = self.tenant.clone().ok_or_else(|| invalid("a sandbox needs a tenant".into()))?;
        let template = Template {
            name: name(new.template.as_str())?,
            // Enough of the digest to tell builds apart.
            version: name(version.get(..32).unwrap_or(&version))?,
        };
        let facts = Facts::new(lifetime, new.metadata);
        let (info, untold) = self.launch(tenant, template, facts, new.template, Source::Pool(budget)).await?;
        untold.told();
        Ok(info)
    }

    /// Makes one, which runs when this returns. Whoever is not told of it has not made it.
    async fn launch(
        &self,
        tenant: Tenant,
        template: Template,
        facts: Facts,
        called: TemplateName,
        source: Source,
    ) -> Result<(SandboxInfo, Untold), SandboxError> {
        let id: SandboxId = format!("sb-{}", Uuid::new_v4().simple())
            .parse()
            .map_err(|error: stasis_state::NameError| SandboxError::Invalid { reason: error.to_string() })?;
        let limits = limits(facts.lifetime);
        let record = Record::new(New { id: id.clone(), tenant, template, facts }, Timestamp::now());
        let created = self.around.store.create(record.clone()).await;
        created.map_err(|error| SandboxError::Store { reason: error.to_string() })?;

        let (reply, started) = oneshot::channel();
        let watchers = vec![Watcher { goal: Goal::Started, reply }];
        let (core, first) = Session::create(limits, Timestamp::now());
        self.spawn(record, core, First::Actions(first), called, source, watchers);
        let untold = Untold(self.find(id.as_str()).ok().map(|(_, handle)| handle.task));
        match started.await {
            Ok(Ok(info)) => Ok((info, untold)),
            failed => {
                untold.told();
                // Nobody is told of it: nothing of it stays.
                let _ = self.kill_one(id.as_str()).await;
                match failed {
                    Ok(Err(error)) => Err(error),
                    _ => Err(SandboxError::Unknown { id: id.to_string() }),
                }
            }
        }
    }

    /// All children or none: those that came to be are killed where another did not.
    async fn fork_off(&self, id: &str, count: u32, budget: Duration) -> Result<Vec<SandboxInfo>, SandboxError> {
        if !(1..=MOST_CHILDREN).contains(&count) {
            return Err(SandboxError::Invalid {
                reason: format!("count is {count}, but must be 1 to {MOST_CHILDREN}"),
            });
        }
        let (_, handle) = self.find(id)?;
        let Origin { moment, record } =
            self.ask(id, "be forked", LIMIT, move |reply| Message::Fork(count, budget, reply)).await?;
        let children = (0..count).map(|_| {
            let facts = Facts::new(record.facts().lifetime, record.facts().metadata.clone());
            let (tenant, template) = (record.tenant().clone(), record.template().clone());
            self.launch(tenant, template, facts, handle.template.clone(), Source::Moment(Arc::clone(&moment)))
        });
        let (mut made, mut failure) = (Vec::new(), None);
        for child in join_all(children).await {
            match child {
                Ok(child) => made.push(child),
                Err(error) => failure = Some(error),
            }
        }
        let (made, untold): (Vec<_>, Vec<_>) = made.into_iter().unzip();
        untold.into_iter().for_each(Untold::told);
        let Some(failure) = failure else { return Ok(made) };
        join_all(made.iter().map(|child| self.kill_one(child.id.as_str()))).await;
        Err(failure)
    }

    /// Waits until a request is let in and connected.
    async fn enter(&self, id: &str, opening: Opening, budget: Duration) -> Result<(SandboxId, Visit), SandboxError> {
        let (known, handle) = self.find(id)?;
        let request = self.request();
        // Whoever leaves while it waits: the task must hear of it.
        let mut leaving = Leaving { request: Some(request), task: handle.task };
        let (limit, beginning) = (budget + TURN, opening.beginning());
        let visit =
            self.ask(id, "take a request", limit, move |reply| Message::Visit(request, opening, budget, reply)).await;
        let visit = match visit {
            Err(error) if beginning.is_some_and(|beginning| !beginning.give_up()) => Err(half_begun(&known, error)),
            visit => visit,
        };
        if visit.is_ok() {
            leaving.request = None; // its lease says when it is over
        }
        Ok((known, visit?))
    }

    async fn kill_one(&self, id: &str) -> Result<(), SandboxError> {
        self.ask(id, "end", LIMIT, Message::Kill).await.map(drop)
    }
}

pub(super) const fn limits(lifetime: Lifetime) -> Limits {
    Limits { lifetime, grace: GRACE, retry: RETRY }
}

/// A sandbox of which nobody has been told: it is killed when this is dropped, since whoever asked for it has left.
struct Untold(Option<mpsc::UnboundedSender<Message>>);

impl Untold {
    fn told(mut self) {
        self.0 = None;
    }
}

impl Drop for Untold {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            // Nobody waits for it, and one that has ended needs no killing.
            let _ = task.send(Message::Kill(oneshot::channel().0));
        }
    }
}

/// A request that waits; told to be over when it is dropped.
struct Leaving {
    request: Option<RequestId>,
    task: mpsc::UnboundedSender<Message>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if let Some(request) = self.request {
            // A task that has ended holds nothing any more.
            let _ = self.task.send(Message::Over(request));
        }
    }
}

/// What the caller of a command hears of whose beginning the guest was told: all but that it was not started leaves that open.
fn half_begun(id: &SandboxId, error: SandboxError) -> SandboxError {
    match error {
        SandboxError::Late { limit, .. } => {
            SandboxError::MayHaveRun { id: id.clone(), reason: format!("nothing came within {limit:?}") }
        }
        SandboxError::Guest { reason, .. } => SandboxError::MayHaveRun { id: id.clone(), reason },
        error @ SandboxError::State { .. } => SandboxError::MayHaveRun { id: id.clone(), reason: error.to_string() },
        SandboxError::Unknown { .. } => SandboxError::Gone { id: id.clone() },
        told => told,
    }
}
