//! A gateway, and a fake node behind it.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use futures_util::{StreamExt as _, future::BoxFuture};
use stasis_gateway::{Config, PrometheusHandle, install_recorder, serve};
use stasis_pool_api::{
    Archive, BuildEvent, BuildEvents, BuildFailure, BuildOptions, Capacity, Claim, ClaimError, Lease, Node, PoolPatch,
    PoolStatus, RemoveError, Sandboxes, SetPoolError, StartKind, TemplateInfo, TemplateName, TemplateSpec, Tenant,
    Timings,
};
use tokio::{
    io::{AsyncWriteExt as _, DuplexStream},
    net::{TcpListener, TcpStream},
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
    time::timeout,
};
use uuid::Uuid;

use crate::sandboxes::NoSandboxes;

pub(crate) use crate::raw_http::{Answer, parse_answer, read_answer, read_to};

/// A weight that this node's disk has no room for.
pub(crate) const UNSTORABLE: u32 = 99;
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// What a claim gets.
pub(crate) enum Claims {
    /// The other end of a VM's pipe.
    Guest(Box<dyn Fn(DuplexStream) -> BoxFuture<'static, ()> + Send + Sync>),
    Refused(fn(TemplateName) -> ClaimError),
    /// Waits for a VM for ever.
    Queued,
}

/// What was seen of VMs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Vms {
    pub(crate) asked: usize,
    pub(crate) held: usize,
    pub(crate) freed: usize,
    /// Claims that were given up while they waited.
    pub(crate) given_up: usize,
}

type BuildScript = Result<Vec<BuildEvent>, BuildFailure>;

pub(crate) struct FakeNode {
    claims: Claims,
    templates: Mutex<BTreeMap<TemplateName, TemplateInfo>>,
    pub(crate) vms: watch::Sender<Vms>,
    pub(crate) reports: Arc<Mutex<Vec<(String, String)>>>,
    pub(crate) build: Mutex<Option<BuildScript>>,
    pub(crate) archive: Mutex<Result<Vec<u8>, String>>,
    pub(crate) options: Mutex<BuildOptions>,
    /// Whose requests reached it.
    pub(crate) tenants: Mutex<Vec<String>>,
}

struct FakeLease {
    vms: watch::Sender<Vms>,
    reports: Arc<Mutex<Vec<(String, String)>>>,
}

impl Lease for FakeLease {
    fn report_failure(&self, request: &str, reason: &str) {
        self.reports.lock().unwrap().push((request.to_owned(), reason.to_owned()));
    }
}

impl Drop for FakeLease {
    fn drop(&mut self) {
        self.vms.send_modify(|vms| {
            vms.held -= 1;
            vms.freed += 1;
        });
    }
}

struct InQueue(watch::Sender<Vms>);

impl Drop for InQueue {
    fn drop(&mut self) {
        self.0.send_modify(|vms| vms.given_up += 1);
    }
}

pub(crate) fn template(name: &str, more: &str) -> TemplateInfo {
    TemplateInfo {
        spec: TemplateSpec::parse(&format!("name = '{name}'\ncommand = 'x'\n{more}")).unwrap(),
        digest: "d1".into(),
        created_at: 1,
        kernel_boot_id: "b".into(),
        build_ms: 2,
        null_request_us: 3,
        memory_bytes: 4,
        made_with: stasis_pool_api::MadeWith::default(),
    }
}

/// Of a node with one template.
pub(crate) fn capacity() -> Capacity {
    let turns = stasis_pool_api::Turns { limit: 4, under_way: 1, queued: 0, per_s: Some(2.5) };
    Capacity {
        memory: stasis_pool_api::MemoryCapacity {
            limit: 1000,
            committed: 400,
            expected_dirty: 100,
            shared: 50,
            free: 450,
            formula: "f".into(),
            returning: 60,
            waited_for: 20,
            returned_per_s: 12.5,
        },
        vcpus: stasis_pool_api::VcpuCapacity {
            cores: 2,
            overcommit: 8,
            limit: 16,
            committed: 3,
            free: 13,
            returning: 1,
            waited_for: 1,
            returned_per_s: 0.5,
        },
        retry_after: stasis_pool_api::RetryRule { formula: "r".into(), lately_s: 30, min_s: 1, max_s: 30 },
        starts: turns,
        repairs: turns,
        templates: vec![],
    }
}

impl Node for FakeNode {
    fn claim<'a>(
        &'a self,
        tenant: &'a Tenant,
        name: &'a TemplateName,
        _budget: Duration,
    ) -> BoxFuture<'a, Result<Claim, ClaimError>> {
        Box::pin(async move {
            self.vms.send_modify(|vms| vms.asked += 1);
            self.tenants.lock().unwrap().push(tenant.to_string());
            let guest = match &self.claims {
                Claims::Guest(guest) => guest,
                Claims::Refused(error) => return Err(error(name.clone())),
                Claims::Queued => {
                    let _place = InQueue(self.vms.clone());
                    std::future::pending().await
                }
            };
            let (ours, theirs) = tokio::io::duplex(16 << 10);
            tokio::spawn(guest(theirs));
            self.vms.send_modify(|vms| vms.held += 1);
            Ok(Claim {
                vm: Uuid::new_v4(),
                template: self.template(name).unwrap(),
                start: StartKind::Paused,
                timings: Timings { claim: Duration::from_micros(250), ..Timings::default() },
                stream: Box::new(ours),
                lease: Box::new(FakeLease { vms: self.vms.clone(), reports: Arc::clone(&self.reports) }),
            })
        })
    }

    fn templates(&self) -> Vec<TemplateInfo> {
        self.templates.lock().unwrap().values().cloned().collect()
    }

    fn template(&self, name: &TemplateName) -> Option<TemplateInfo> {
        self.templates.lock().unwrap().get(name).cloned()
    }

    fn build(&self, mut archive: Archive, options: BuildOptions) -> BoxFuture<'_, Result<BuildEvents, BuildFailure>> {
        Box::pin(async move {
            *self.options.lock().unwrap() = options;
            let mut bytes = Vec::new();
            while let Some(chunk) = archive.next().await {
                match chunk {
                    Ok(chunk) => bytes.extend_from_slice(&chunk),
                    Err(error) => {
                        *self.archive.lock().unwrap() = Err(error.to_string());
                        return Err(BuildFailure::Invalid { reason: "the archive is cut".into() });
                    }
                }
            }
            *self.archive.lock().unwrap() = Ok(bytes);
            let script = self.build.lock().unwrap().take().unwrap()?;
            let (events, receiver) = mpsc::channel(1);
            tokio::spawn(async move {
                for event in script {
                    events.send(event).await.unwrap();
                }
            });
            Ok(receiver)
        })
    }

    fn remove<'a>(&'a self, name: &'a TemplateName) -> BoxFuture<'a, Result<(), RemoveError>> {
        Box::pin(async move {
            let removed = self.templates.lock().unwrap().remove(name);
            removed.map(|_| ()).ok_or_else(|| RemoveError::Unknown(name.clone()))
        })
    }

    fn sandboxes(&self, tenant: &Tenant) -> Arc<dyn Sandboxes> {
        self.tenants.lock().unwrap().push(tenant.to_string());
        Arc::new(NoSandboxes)
    }

    fn capacity(&self) -> Capacity {
        capacity()
    }

    fn pools<'a>(&'a self, tenant: &'a Tenant) -> BoxFuture<'a, Vec<PoolStatus>> {
        let pools = self
            .templates()
            .into_iter()
            .map(|info| PoolStatus::without_vms(tenant.clone(), &info, info.spec.pool.clone()));
        let pools = pools.collect();
        Box::pin(async { pools })
    }

    fn pool<'a>(&'a self, tenant: &'a Tenant, name: &'a TemplateName) -> BoxFuture<'a, Option<PoolStatus>> {
        Box::pin(async move { self.pools(tenant).await.into_iter().find(|pool| pool.template == *name) })
    }

    fn set_pool<'a>(
        &'a self,
        tenant: &'a Tenant,
        name: &'a TemplateName,
        patch: PoolPatch,
    ) -> BoxFuture<'a, Result<PoolStatus, SetPoolError>> {
        Box::pin(async move {
            let pool = self.pool(tenant, name).await.ok_or_else(|| SetPoolError::UnknownTemplate(name.clone()))?;
            let settings = patch.on(&pool.settings);
            if settings.min > settings.max {
                return Err(SetPoolError::Invalid("pool.min is too large".into()));
            }
            if settings.weight == UNSTORABLE {
                return Err(SetPoolError::Store("no space left".into()));
            }
            Ok(PoolStatus { settings, ..pool })
        })
    }
}

/// A running gateway. Dropping it stops it.
pub(crate) struct Gateway {
    pub(crate) address: SocketAddr,
    pub(crate) node: Arc<FakeNode>,
    pub(crate) stop: oneshot::Sender<()>,
    pub(crate) stopped: JoinHandle<()>,
}

pub(crate) fn recorder() -> PrometheusHandle {
    static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();
    RECORDER.get_or_init(|| install_recorder().unwrap()).clone()
}

impl Gateway {
    /// With one template, `name`, whose `template.toml` also says `more`.
    pub(crate) async fn start(name: &str, more: &str, config: Config, claims: Claims) -> Self {
        let info = template(name, more);
        let node = Arc::new(FakeNode {
            claims,
            templates: Mutex::new(BTreeMap::from([(info.spec.name.clone(), info)])),
            vms: watch::Sender::default(),
            reports: Arc::default(),
            build: Mutex::default(),
            archive: Mutex::new(Ok(vec![])),
            options: Mutex::default(),
            tenants: Mutex::default(),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, told) = oneshot::channel::<()>();
        let served = serve(listener, Arc::clone(&node) as Arc<dyn Node>, config, recorder(), async {
            let _ = told.await;
        });
        Self { address, node, stop, stopped: tokio::spawn(served) }
    }

    /// With a guest that speaks for itself.
    pub(crate) async fn raw<F, R>(name: &str, guest: F) -> Self
    where
        F: Fn(DuplexStream) -> R + Send + Sync + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        Self::start(name, "", Config::default(), raw_guest(guest)).await
    }

    pub(crate) async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends the bytes, and reads until the gateway closes.
    pub(crate) async fn exchange(&self, request: impl AsRef<[u8]>) -> Answer {
        let mut stream = self.connect().await;
        stream.write_all(request.as_ref()).await.unwrap();
        read_answer(&mut stream).await
    }

    /// `METHOD PATH`, closing after the answer.
    pub(crate) async fn ask(&self, what: &str) -> Answer {
        self.exchange(format!("{what} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")).await
    }

    pub(crate) async fn until(&self, wanted: impl FnMut(&Vms) -> bool) -> Vms {
        let mut vms = self.node.vms.subscribe();
        *timeout(PATIENCE, vms.wait_for(wanted)).await.expect("the VMs never came to that").unwrap()
    }

    pub(crate) fn reports(&self) -> Vec<(String, String)> {
        self.node.reports.lock().unwrap().clone()
    }

    /// Waits until the counter for this ending of an invocation is one.
    pub(crate) async fn until_counted(&self, template: &str, code: u16, start: &str) {
        let line =
            format!("stasis_invoke_requests_total{{template=\"{template}\",code=\"{code}\",start=\"{start}\"}} 1");
        let counted = async {
            while !recorder().render().lines().any(|one| one == line) {
                tokio::task::yield_now().await;
            }
        };
        timeout(PATIENCE, counted).await.unwrap_or_else(|_| panic!("no {line} in:\n{}", recorder().render()));
    }
}

pub(crate) fn raw_guest<F, R>(guest: F) -> Claims
where
    F: Fn(DuplexStream) -> R + Send + Sync + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    Claims::Guest(Box::new(move |stream| Box::pin(guest(stream))))
}
