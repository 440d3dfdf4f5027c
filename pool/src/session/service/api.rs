//! What callers ask of a node's sandboxes.

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt, join_all};
use stasis_pool_api::{
    Claim, Command, CommandEvents, Hold, Name, NewSandbox, PauseTo, SandboxError, SandboxInfo, SandboxLogs,
    SandboxState as State, Sandboxes, TemplateName, Timestamp, Timings,
};
use tokio::sync::oneshot;

use super::{
    super::{
        exec,
        message::Message,
        visit::{Beginning, Opening, Visit},
    },
    Handle, LIMIT, LocalSandboxes,
};

/// How long whoever looks at a sandbox waits for its task, which is busy while the store takes a write of it. Chosen, not measured: a person
/// who lists sandboxes does not notice it.
const LOOK: Duration = Duration::from_millis(500);

/// What its task says of a sandbox; if that is busy, what its record says; nothing if it is gone.
async fn look(handle: &Handle) -> Option<SandboxInfo> {
    let (reply, info) = oneshot::channel();
    handle.task.send(Message::Inspect(reply)).ok()?;
    match tokio::time::timeout(LOOK, info).await {
        Ok(info) => info.ok(),
        Err(_) => Some(handle.view.borrow().clone()),
    }
}

impl Sandboxes for LocalSandboxes {
    fn create(&self, new: NewSandbox, budget: Duration) -> BoxFuture<'_, Result<SandboxInfo, SandboxError>> {
        self.make(new, budget).boxed()
    }

    fn list(&self, state: Option<State>) -> BoxFuture<'_, Vec<SandboxInfo>> {
        async move {
            let tasks: Vec<_> = self.read().values().filter(|handle| self.shows(handle)).cloned().collect();
            let infos = join_all(tasks.iter().map(look)).await.into_iter().flatten();
            infos.filter(|info| state.is_none_or(|state| info.state == state)).collect()
        }
        .boxed()
    }

    fn template_of(&self, id: &str) -> Option<TemplateName> {
        self.find(id).ok().map(|(_, handle)| handle.template)
    }

    fn inspect<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<SandboxInfo, SandboxError>> {
        async move {
            let (id, handle) = self.find(id)?;
            look(&handle).await.ok_or_else(|| SandboxError::Unknown { id: id.to_string() })
        }
        .boxed()
    }

    fn pause<'a>(&'a self, id: &'a str, to: PauseTo) -> BoxFuture<'a, Result<SandboxInfo, SandboxError>> {
        self.ask(id, "pause", LIMIT, move |reply| Message::Pause(to, reply)).boxed()
    }

    fn resume<'a>(
        &'a self,
        id: &'a str,
        timeout: Option<Duration>,
    ) -> BoxFuture<'a, Result<(SandboxInfo, bool), SandboxError>> {
        let request = self.request();
        self.ask(id, "resume", LIMIT, move |reply| Message::Resume(request, timeout, reply)).boxed()
    }

    fn timeout<'a>(&'a self, id: &'a str, timeout: Duration) -> BoxFuture<'a, Result<SandboxInfo, SandboxError>> {
        self.ask(id, "take another timeout", LIMIT, move |reply| Message::Timeout(timeout, reply)).boxed()
    }

    fn hold<'a>(
        &'a self,
        id: &'a str,
        name: Name,
        lasts: Option<Duration>,
    ) -> BoxFuture<'a, Result<SandboxInfo, SandboxError>> {
        let hold = Hold { name, until: lasts.map(|lasts| Timestamp::now().plus(lasts)) };
        self.ask(id, "take a hold", LIMIT, move |reply| Message::Hold(hold, reply)).boxed()
    }

    fn release<'a>(&'a self, id: &'a str, name: Name) -> BoxFuture<'a, Result<SandboxInfo, SandboxError>> {
        self.ask(id, "release a hold", LIMIT, move |reply| Message::Release(name, reply)).boxed()
    }

    fn fork<'a>(
        &'a self,
        id: &'a str,
        count: u32,
        budget: Duration,
    ) -> BoxFuture<'a, Result<Vec<SandboxInfo>, SandboxError>> {
        self.fork_off(id, count, budget).boxed()
    }

    fn kill<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<(), SandboxError>> {
        self.kill_one(id).boxed()
    }

    fn visit<'a>(&'a self, id: &'a str, budget: Duration) -> BoxFuture<'a, Result<Claim, SandboxError>> {
        async move {
            let (known, visit) = self.enter(id, Opening::Function, budget).await?;
            let Visit { stream, lease, template, start, waited, connected } = visit;
            let (queue, restore) = match start {
                stasis_pool_api::StartKind::Resumed => (Duration::ZERO, waited),
                _ => (waited, Duration::ZERO),
            };
            Ok(Claim {
                vm: known.as_str().strip_prefix("sb-").and_then(|id| id.parse().ok()).unwrap_or_default(),
                template,
                start,
                timings: Timings { queue, claim: connected, restore, repair: Duration::ZERO },
                stream: Box::new(stream),
                lease: Box::new(lease),
            })
        }
        .boxed()
    }

    fn exec<'a>(
        &'a self,
        id: &'a str,
        command: Command,
        budget: Duration,
    ) -> BoxFuture<'a, Result<CommandEvents, SandboxError>> {
        async move {
            if let Some(reason) = command.fault() {
                return Err(SandboxError::Invalid { reason });
            }
            let (id, visit) =
                self.enter(id, Opening::Command(exec::order(command), Beginning::default()), budget).await?;
            tracing::info!(sandbox = %id, "a command runs in a sandbox");
            Ok(exec::follow(visit))
        }
        .boxed()
    }

    fn logs<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<SandboxLogs, SandboxError>> {
        async move {
            let ask = || self.ask(id, "say what it has printed", LIMIT, Message::Logs);
            match ask().await {
                // Its VM has ended under the question, which is no reason: what is known without one.
                Err(SandboxError::State { .. }) => ask().await,
                told => told,
            }
        }
        .boxed()
    }
}
