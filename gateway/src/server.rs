//! Connections: accepting, serving and ending them.
//!
//! ```text
//! accept ──▶ one task per connection ──▶ told to stop: finish what runs ──▶ after `drain`: cut
//! ```

use std::{
    convert::Infallible,
    io,
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use hyper::service::service_fn;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
};
use metrics_exporter_prometheus::PrometheusHandle;
use stasis_pool_api::Node;
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time,
};

use crate::{config::Config, front::Front, metrics::AllSeries, routes};

/// Longest head of a request; hyper answers 431 beyond it.
const MAX_HEAD: usize = 128 << 10;
/// How long a connection may take to send a head, and to send the next one.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// How often the recorder folds its histograms, which grow until then.
const UPKEEP: Duration = Duration::from_secs(5);
/// When to accept again after running out of file descriptors.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(200);

/// Serves HTTP/1.1 and HTTP/2 (prior knowledge) on `listener` until `shutdown`, then lets requests finish for
/// [`Config::drain`]. When it returns, no connection is left.
pub async fn serve(
    listener: TcpListener,
    node: Arc<dyn Node>,
    config: Config,
    metrics: PrometheusHandle,
    shutdown: impl Future<Output = ()>,
) {
    let series = Arc::<AllSeries>::default();
    let api = routes::router(Arc::clone(&node), config.clone(), metrics.clone(), Arc::clone(&series));
    let drain = config.drain;
    let front = Arc::new(Front { node, config, api, series });
    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new();
    let mut upkeep = time::interval(UPKEEP);
    let mut shutdown = pin!(shutdown);

    loop {
        tokio::select! {
            () = &mut shutdown => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => {
                    let served = serve_connection(stream, peer, Arc::clone(&front), &graceful);
                    connections.spawn(served);
                }
                Err(error) => accept_failed(&error).await,
            },
            Some(_) = connections.join_next() => {}
            _ = upkeep.tick() => metrics.run_upkeep(),
        }
    }
    drop(listener);
    let finished = async {
        graceful.shutdown().await;
        while connections.join_next().await.is_some() {}
    };
    if time::timeout(drain, finished).await.is_err() {
        tracing::warn!(cut = connections.len(), ?drain, "requests did not finish in time");
        connections.shutdown().await;
    }
}

fn serve_connection(
    stream: TcpStream,
    peer: SocketAddr,
    front: Arc<Front>,
    graceful: &GracefulShutdown,
) -> impl Future<Output = ()> + use<> {
    let watcher = graceful.watcher();
    let peer_address: IpAddr = peer.ip().to_canonical();
    async move {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%peer, %error, "TCP_NODELAY was refused");
        }
        let service = service_fn(move |request| {
            let front = Arc::clone(&front);
            async move { Ok::<_, Infallible>(front.answer(request, peer_address).await) }
        });
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(MAX_HEAD);
        builder.http2().timer(TokioTimer::new());
        let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service).into_owned();
        if let Err(error) = watcher.watch(connection).await {
            tracing::debug!(%peer, error = &*error, "connection ended early");
        }
    }
}

async fn accept_failed(error: &io::Error) {
    let of_the_caller = matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
    );
    if !of_the_caller {
        tracing::error!(%error, "cannot accept connections");
        time::sleep(ACCEPT_BACKOFF).await;
    }
}
