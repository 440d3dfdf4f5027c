//! A node with one sandbox and a fake VM: the session behind a lock, its actions outside, the store real.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use stasis_state::{
    Action, Event, Facts, Input, Lifetime, Limits, Metadata, New, OnTimeout, Record, RequestId, SandboxId, Session,
    Store, Template, Timestamp, Work,
};
use tokio::sync::oneshot;

/// What happened, of all sandboxes.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) requests: AtomicUsize,
    pub(crate) executed: AtomicUsize,
    pub(crate) paused: AtomicUsize,
    pub(crate) called_off: AtomicUsize,
    pub(crate) called_off_after_stop: AtomicUsize,
    pub(crate) resumed: AtomicUsize,
}

pub(crate) struct Sandbox {
    id: SandboxId,
    store: Arc<dyn Store>,
    session: Mutex<Session>,
    clock: AtomicU64,
    runs: AtomicBool,
    inside: AtomicUsize,
    next: AtomicU64,
    waiting: Mutex<HashMap<RequestId, oneshot::Sender<()>>>,
    executed: Mutex<HashSet<RequestId>>,
    counts: Arc<Counts>,
}

impl Sandbox {
    pub(crate) async fn make(id: &str, store: Arc<dyn Store>, counts: Arc<Counts>) -> Arc<Self> {
        let lifetime = Lifetime {
            timeout: None,
            on_timeout: OnTimeout::Pause,
            auto_resume: true,
            pause_after: Some(Duration::from_millis(100)),
            hibernate_after: None,
        };
        let record = Record::new(
            New {
                id: id.parse().unwrap(),
                tenant: "acme".parse().unwrap(),
                template: Template { name: "t".parse().unwrap(), version: "1".parse().unwrap() },
                facts: Facts::new(lifetime, Metadata::default()),
            },
            Timestamp::from_ms(0),
        );
        store.create(record.clone()).await.unwrap();
        let limits = Limits { lifetime, grace: Duration::ZERO, retry: Duration::from_millis(10) };
        let (session, first) = Session::create(limits, Timestamp::from_ms(0));
        assert_eq!(first, [Action::Do(Work::Create)]);
        let sandbox = Arc::new(Self {
            id: record.id().clone(),
            store,
            session: Mutex::new(session),
            clock: AtomicU64::new(0),
            runs: AtomicBool::new(true),
            inside: AtomicUsize::new(0),
            next: AtomicU64::new(0),
            waiting: Mutex::default(),
            executed: Mutex::default(),
            counts,
        });
        sandbox.give(Input::Did).await;
        sandbox
    }

    fn now(&self) -> Timestamp {
        Timestamp::from_ms(self.clock.load(SeqCst))
    }

    /// Lets so much time pass that an idle sandbox is to be paused.
    pub(crate) async fn time_passes(&self) {
        self.clock.fetch_add(1_000, SeqCst);
        self.give(Input::Timer).await;
    }

    async fn give(&self, input: Input) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let actions = self.session.lock().unwrap().take(input, self.now());
            for action in actions {
                match action {
                    Action::Admit(request) => {
                        // Gone: it was admitted before.
                        self.waiting.lock().unwrap().remove(&request).expect("answered twice").send(()).unwrap();
                    }
                    Action::Write(event) => inputs.push_back(self.write(event).await),
                    Action::Do(work) => inputs.push_back(self.work(work).await),
                    other => panic!("{other:?} does not belong here"),
                }
            }
        }
    }

    async fn write(&self, event: Event) -> Input {
        let record = self.store.get(&self.id).await.unwrap();
        let record = self.store.commit(record.on(event, self.now()).unwrap()).await.unwrap();
        match event {
            Event::Paused => self.counts.paused.fetch_add(1, SeqCst),
            Event::Resumed => self.counts.resumed.fetch_add(1, SeqCst),
            Event::StillRunning => self.counts.called_off.fetch_add(1, SeqCst),
            _ => 0,
        };
        Input::written(&record)
    }

    async fn work(&self, work: Work) -> Input {
        match work {
            Work::Stop => {
                assert_eq!(self.inside.load(SeqCst), 0, "paused under a request");
                assert!(self.runs.swap(false, SeqCst), "stopped twice");
            }
            Work::Go => {
                assert!(!self.runs.swap(true, SeqCst), "resumed twice");
                let pausing = self.session.lock().unwrap().status(self.now()).state == stasis_state::State::Pausing;
                self.counts.called_off_after_stop.fetch_add(usize::from(pausing), SeqCst);
            }
            other => panic!("{other:?} does not belong here"),
        }
        // Stopping and starting take their time, none to two milliseconds, in which others come.
        let takes = self.next.load(SeqCst) * 997 % 2_000;
        tokio::time::sleep(Duration::from_micros(takes)).await;
        Input::Did
    }

    pub(crate) async fn request(&self) {
        let request = RequestId(self.next.fetch_add(1, SeqCst));
        self.counts.requests.fetch_add(1, SeqCst);
        let (tell, told) = oneshot::channel();
        self.waiting.lock().unwrap().insert(request, tell);
        self.give(Input::Came(request)).await;
        told.await.expect("never answered");
        self.inside.fetch_add(1, SeqCst);
        for _ in 0..3 {
            assert!(self.runs.load(SeqCst), "{request:?} is in a VM that is paused");
            tokio::task::yield_now().await;
        }
        assert!(self.executed.lock().unwrap().insert(request), "{request:?} ran twice");
        self.counts.executed.fetch_add(1, SeqCst);
        self.inside.fetch_sub(1, SeqCst);
        self.give(Input::Over(request)).await;
    }
}
