//! The calls of `filesystem.Filesystem`.

use std::path::PathBuf;

use axum::{
    Router,
    extract::{Request, State},
    response::Response,
    routing::post,
};
use http::HeaderMap;

use crate::{
    access,
    connect::{Code, RpcError, first, stream, unary},
    envd::Envd,
    filesystem::{
        message::{At, Empty, Events, Found, ListDir, Listed, Move, Watch, WatcherId},
        operations,
        watching::{self, Watching},
    },
    paths,
    users::{User, Users},
};

/// Where they are served.
pub(crate) fn routes() -> Router<Envd> {
    Router::new()
        .route("/filesystem.Filesystem/Stat", post(stat))
        .route("/filesystem.Filesystem/ListDir", post(list))
        .route("/filesystem.Filesystem/MakeDir", post(make))
        .route("/filesystem.Filesystem/Move", post(rename))
        .route("/filesystem.Filesystem/Remove", post(remove))
        .route("/filesystem.Filesystem/WatchDir", post(watch))
        .route("/filesystem.Filesystem/CreateWatcher", post(create_watcher))
        .route("/filesystem.Filesystem/GetWatcherEvents", post(watcher_events))
        .route("/filesystem.Filesystem/RemoveWatcher", post(remove_watcher))
}

/// Who asks, and where their paths lead.
struct Caller {
    user: User,
    users: Users,
    workdir: Option<PathBuf>,
}

impl Caller {
    fn of(envd: &Envd, headers: &HeaderMap) -> Result<Self, RpcError> {
        Ok(Self { user: access::user(envd, headers)?, users: envd.users(), workdir: envd.workdir() })
    }

    fn path(&self, path: &str) -> Result<PathBuf, RpcError> {
        paths::resolve(path, &self.user, self.workdir.as_deref()).map_err(|error| RpcError::invalid(error.to_string()))
    }
}

/// On a thread that may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RpcError> + Send + 'static,
) -> Result<T, RpcError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| RpcError::new(Code::Internal, error.to_string()))?
}

async fn stat(State(envd): State<Envd>, request: Request) -> Response {
    let call = async |headers, request: At| {
        let caller = Caller::of(&envd, &headers)?;
        let path = caller.path(&request.path)?;
        Ok(Found { entry: blocking(move || operations::stat(&path, &caller.users)).await? })
    };
    unary(request, call).await
}

async fn list(State(envd): State<Envd>, request: Request) -> Response {
    let call = async |headers, request: ListDir| {
        let caller = Caller::of(&envd, &headers)?;
        let path = caller.path(&request.path)?;
        let depth = request.depth.unwrap_or_default();
        Ok(Listed { entries: blocking(move || operations::list(&path, depth, &caller.users)).await? })
    };
    unary(request, call).await
}

async fn make(State(envd): State<Envd>, request: Request) -> Response {
    let call = async |headers, request: At| {
        let caller = Caller::of(&envd, &headers)?;
        let path = caller.path(&request.path)?;
        Ok(Found { entry: blocking(move || operations::make(&path, &caller.user, &caller.users)).await? })
    };
    unary(request, call).await
}

async fn rename(State(envd): State<Envd>, request: Request) -> Response {
    let call = async |headers, request: Move| {
        let caller = Caller::of(&envd, &headers)?;
        let (source, destination) = (caller.path(&request.source)?, caller.path(&request.destination)?);
        let moved = move || operations::rename(&source, &destination, &caller.user, &caller.users);
        Ok(Found { entry: blocking(moved).await? })
    };
    unary(request, call).await
}

async fn remove(State(envd): State<Envd>, request: Request) -> Response {
    let call = async |headers, request: At| {
        let path = Caller::of(&envd, &headers)?.path(&request.path)?;
        blocking(move || operations::remove(&path)).await?;
        Ok(Empty {})
    };
    unary(request, call).await
}

async fn watch(State(envd): State<Envd>, request: Request) -> Response {
    let call = async |headers, mut frames| {
        let request: Watch = first(&mut frames).await?;
        let user = access::user(&envd, &headers)?;
        Ok(watching::stream(Watching::begin(&envd, &user, request).await?, &headers))
    };
    stream(request, call).await
}

async fn create_watcher(State(envd): State<Envd>, request: Request) -> Response {
    let call = async |headers, request: Watch| {
        let user = access::user(&envd, &headers)?;
        let watching = Watching::begin(&envd, &user, request).await?;
        Ok(WatcherId { watcher_id: envd.watchers().add(watching) })
    };
    unary(request, call).await
}

async fn watcher_events(State(envd): State<Envd>, request: Request) -> Response {
    unary(request, async |_, request: WatcherId| Ok(Events { events: envd.watchers().take(&request.watcher_id)? }))
        .await
}

async fn remove_watcher(State(envd): State<Envd>, request: Request) -> Response {
    let call = async |_, request: WatcherId| {
        envd.watchers().remove(&request.watcher_id)?;
        Ok(Empty {})
    };
    unary(request, call).await
}
